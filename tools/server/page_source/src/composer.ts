/* Where the user writes: Enter sends, Shift+Enter begins a line, the arrow up edits the last message. */

import { h, icon } from "./dom";

export interface ComposerActions {
  send(text: string): void;
  stop(): void;
  editLast(): void;
}

/** Unsent text survives a reload, in this tab. */
const DRAFT = "mlc-amd.draft";

export class Composer {
  private readonly area = h("textarea", { id: "composer", rows: "1", dir: "auto", placeholder: "Message", "aria-label": "Message", enterkeyhint: "send" });
  private readonly button = h("button", { type: "submit", class: "send" });
  readonly element = h("form", { class: "composer" }, this.area, this.button);
  private busy: boolean | null = null;

  constructor(private readonly actions: ComposerActions) {
    this.area.value = sessionStorage.getItem(DRAFT) ?? "";
    this.area.addEventListener("input", () => this.changed());
    this.area.addEventListener("keydown", (event) => this.key(event));
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.busy) this.actions.stop();
      else this.send();
    });
    this.setBusy(false);
  }

  /** Busy: an answer is being written, and the button stops it. */
  setBusy(busy: boolean): void {
    if (busy !== this.busy) {
      this.busy = busy;
      const label = busy ? "Stop (Esc)" : "Send (Enter)";
      this.button.replaceChildren(icon(busy ? "stop" : "send"));
      this.button.setAttribute("aria-label", label);
      this.button.title = label;
      this.button.classList.toggle("busy", busy);
    }
    this.changed();
  }

  focus(): void {
    this.area.focus();
  }

  private send(): void {
    const text = this.area.value.trim();
    if (!text) return;
    this.area.value = "";
    this.changed();
    this.actions.send(text);
  }

  private changed(): void {
    const empty = !this.area.value.trim();
    this.button.disabled = !this.busy && empty;
    sessionStorage.setItem(DRAFT, this.area.value);
    if (!CSS.supports("field-sizing", "content")) {
      this.area.style.height = "auto";
      this.area.style.height = `${this.area.scrollHeight}px`;
    }
  }

  private key(event: KeyboardEvent): void {
    // While an input method composes, Enter chooses a word; on phones it begins a line.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches) {
      event.preventDefault();
      if (!this.busy) this.send();
    } else if (event.key === "ArrowUp" && !this.area.value) {
      event.preventDefault();
      this.actions.editLast();
    }
  }
}
