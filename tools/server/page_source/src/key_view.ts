/* Asks for the server's API key. */

import { h } from "./dom";
import { apiKey, isKeyKept, setApiKey } from "./settings";

const WANTED = "This server answers only requests with its key.";
const WRONG = "The server does not accept this key.";
const OPTIONAL = "Some servers answer only requests with their key.";

export class KeyView {
  private readonly input = h("input", { type: "password", id: "key", autocomplete: "off", spellcheck: "false" });
  private readonly keep = h("input", { type: "checkbox", id: "key-keep" });
  private readonly hint = h("p", { class: "hint", id: "key-hint" });
  readonly element: HTMLDialogElement;

  /** `onKey` is called after the key changed. */
  constructor(onKey: () => void) {
    const cancel = h("button", { type: "button", class: "button", onclick: () => this.element.close() }, "Cancel");
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", { id: "key-title" }, "API key"),
      this.hint,
      h("div", { class: "field" }, h("label", { for: "key" }, "Key"), this.input),
      h("label", { class: "check" }, this.keep, "Keep it in this browser"),
      h("div", { class: "row end" }, cancel, h("button", { type: "submit", class: "button primary" }, "Use key")),
    );
    form.addEventListener("submit", () => {
      setApiKey(this.input.value.trim() || null, this.keep.checked);
      onKey();
    });
    this.element = h("dialog", { class: "box", "aria-labelledby": "key-title", "aria-describedby": "key-hint" }, form);
  }

  /** `refused`: the server did not answer a request with the key that is set, or without one. */
  open(refused: boolean): void {
    if (this.element.open) return;
    const key = apiKey();
    const wrong = refused && key !== null;
    this.hint.textContent = wrong ? WRONG : refused ? WANTED : OPTIONAL;
    this.hint.classList.toggle("wrong", wrong);
    this.input.value = key ?? "";
    this.keep.checked = isKeyKept();
    this.element.showModal();
    this.input.select();
  }
}
