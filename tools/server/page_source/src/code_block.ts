/* A block of code with its language and a button that copies it; and code that grows, without colours. */

import { copyButton } from "./clipboard";
import { h } from "./dom";

/** Characters of a part of growing code: the browser lays out again only the part that changes. */
const PART = 4_000;

/** `code` in its frame; `language` as the text names it, or "". */
export function codeBlock(code: HTMLElement, language: string): HTMLElement {
  const name = language.trim().split(/\s/)[0] || "text";
  return h(
    "div",
    { class: "code" },
    h("div", { class: "code-head" }, h("span", {}, name), copyButton("Copy code", () => code.textContent ?? "", "Copy")),
    h("pre", { tabindex: "0", "aria-label": `Code, ${name}` }, code),
  );
}

/** Code of which the beginning stays. */
export class GrowingCode {
  readonly element = h("code");
  private last = document.createTextNode("");
  private text = "";

  constructor(text: string) {
    this.begin();
    this.grow(text);
  }

  /** Shows `text`; false if it does not begin with what is shown. */
  grow(text: string): boolean {
    if (!text.startsWith(this.text)) return false;
    let from = this.text.length;
    // Parts end at the end of a line.
    while (this.last.length + text.length - from > PART) {
      const end = text.indexOf("\n", Math.max(from, from + PART - this.last.length)) + 1;
      if (end === 0) break;
      this.last.appendData(text.slice(from, end));
      from = end;
      this.begin();
    }
    this.last.appendData(text.slice(from));
    this.text = text;
    return true;
  }

  private begin(): void {
    this.last = document.createTextNode("");
    this.element.append(h("span", { class: "part" }, this.last));
  }
}
