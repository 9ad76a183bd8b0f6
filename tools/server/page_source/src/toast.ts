/* Short messages at the edge of the page, with one thing to do about them. */

import { h } from "./dom";

const SHOWN_MS = 8000;

export class Toasts {
  readonly element = h("div", { class: "toasts", role: "status" });

  show(text: string, action?: { label: string; run: () => void }): void {
    const toast = h("div", { class: "toast" }, h("span", {}, text));
    const timer = setTimeout(() => toast.remove(), SHOWN_MS);
    if (action) {
      const run = () => {
        clearTimeout(timer);
        toast.remove();
        action.run();
      };
      toast.append(h("button", { type: "button", class: "quiet", onclick: run }, action.label));
    }
    this.element.append(toast);
  }
}
