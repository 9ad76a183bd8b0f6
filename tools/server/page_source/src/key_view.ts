/* Asks for the server's API key. */

import { h } from "./dom";
import { apiKey, setApiKey } from "./settings";

export class KeyView {
  private readonly input = h("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false" });
  private readonly keep = h("input", { type: "checkbox", id: "key-keep" });
  readonly element: HTMLDialogElement;

  /** `onKey` is called after the key changed. */
  constructor(onKey: () => void) {
    const cancel = h("button", { type: "button", class: "button", onclick: () => this.element.close() }, "Cancel");
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id: "key-title" }, "API key"),
      h("p", { class: "hint" }, "This server answers only requests with its key."),
      h("div", { class: "field" }, h("label", { for: "key" }, "Key"), this.input),
      h("label", { class: "check" }, this.keep, "Keep it in this browser"),
      h("div", { class: "row end" }, cancel, h("button", { type: "submit", class: "button primary" }, "Use key")),
    );
    form.addEventListener("submit", () => {
      setApiKey(this.input.value.trim() || null, this.keep.checked);
      onKey();
    });
    this.element = h("dialog", { class: "box", "aria-labelledby": "key-title" }, form);
  }

  open(): void {
    if (this.element.open) return;
    this.input.value = apiKey() ?? "";
    this.element.showModal();
    this.input.select();
  }
}
