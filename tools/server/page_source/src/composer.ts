/* Where the user writes and attaches files: Enter sends, Shift+Enter begins a line, the arrow up edits the last message. */

import { h, icon, iconButton } from "./dom";
import { readFile, shown } from "./files";
import { isPicture } from "./images";
import { type Attachment, imagesOf, type TextFile } from "./types";

export interface ComposerActions {
  send(text: string, files: Attachment[]): void;
  stop(): void;
  editLast(): void;
  changed(): void;
  /** How much of the context a file takes, in words. */
  share(file: TextFile): Promise<string>;
  /** Why images cannot be sent, for people; "": they can, or that is not known. */
  blind(): string;
}

/** Unsent text survives a reload, in this tab. */
const DRAFT = "mlc-amd.draft";

export class Composer {
  private readonly area = h("textarea", { id: "composer", rows: "1", dir: "auto", placeholder: "Message", "aria-label": "Message", enterkeyhint: "send" });
  private readonly button = h("button", { type: "submit", class: "send" });
  private readonly chooser = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files to attach" });
  private readonly chips = h("ul", { class: "chips", "aria-label": "Attached files", hidden: true });
  private readonly refusals = h("div", { class: "refusals", role: "alert", hidden: true });
  readonly element: HTMLFormElement;
  private busy: boolean | null = null;
  private attached: { file: Attachment; share: string }[] = [];

  constructor(private readonly actions: ComposerActions) {
    const attach = iconButton("attach", "Attach images and text files", () => this.chooser.click());
    const row = h("div", { class: "writing" }, attach, this.chooser, this.area, this.button);
    this.element = h("form", { class: "composer" }, this.refusals, this.chips, row);
    this.area.value = sessionStorage.getItem(DRAFT) ?? "";
    this.area.addEventListener("input", () => this.changed());
    this.area.addEventListener("keydown", (event) => this.key(event));
    this.chooser.addEventListener("change", () => {
      void this.attach([...(this.chooser.files ?? [])]);
      this.chooser.value = "";
    });
    this.area.addEventListener("paste", (event) => this.takeFiles(event, event.clipboardData));
    addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      this.element.classList.add("dropping");
    });
    for (const name of ["dragleave", "drop"]) addEventListener(name, () => this.element.classList.remove("dropping"));
    addEventListener("drop", (event) => this.takeFiles(event, event.dataTransfer));
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.busy) this.actions.stop();
      else this.send();
    });
    this.setBusy(false);
  }

  get text(): string {
    return this.area.value.trim();
  }

  get files(): Attachment[] {
    return this.attached.map(({ file }) => file);
  }

  /** What could not be sent, unless the user has begun something else. */
  putBack(text: string, files: Attachment[]): void {
    if (this.text || this.attached.length > 0) return;
    this.area.value = text;
    this.attached = files.map((file) => ({ file, share: "" }));
    this.drawChips();
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
    const { text, files } = this;
    if (!text && files.length === 0) return;
    const blind = imagesOf(files).length > 0 && this.actions.blind();
    if (blind) return this.refuse([blind]);
    this.area.value = "";
    this.attached = [];
    this.refuse([]);
    this.drawChips();
    this.actions.send(text, files);
  }

  /** Files that are pasted or dropped; text, which some programs copy with its image, is the field's. */
  private takeFiles(event: Event, data: DataTransfer | null): void {
    if (!data?.files.length || data.types.includes("text/plain")) return;
    event.preventDefault();
    if (!document.querySelector("dialog[open]")) void this.attach([...data.files]);
  }

  private async attach(files: File[]): Promise<void> {
    const refused = new Set<string>();
    for (const file of files) {
      try {
        const blind = isPicture(file) && this.actions.blind();
        if (blind) throw new Error(blind);
        const read = await readFile(file);
        const added = { file: read, share: "" };
        this.attached.push(added);
        if ("url" in read) continue;
        void this.actions.share(read).then((share) => {
          added.share = share;
          this.drawChips();
        });
      } catch (error) {
        refused.add(error instanceof Error ? error.message : String(error));
      }
    }
    this.refuse([...refused]);
    this.drawChips();
    this.focus();
  }

  private refuse(lines: string[]): void {
    this.refusals.hidden = lines.length === 0;
    this.refusals.replaceChildren(...lines.map((line) => h("p", {}, line)));
  }

  private drawChips(): void {
    const remove = (one: { file: Attachment }) => {
      this.attached = this.attached.filter((other) => other !== one);
      this.drawChips();
      this.focus();
    };
    this.chips.replaceChildren(...this.attached.map((one) => shown(one.file, one.share, () => remove(one))));
    this.chips.hidden = this.attached.length === 0;
    this.changed();
  }

  private changed(): void {
    this.button.disabled = !this.busy && !this.text && this.attached.length === 0;
    sessionStorage.setItem(DRAFT, this.area.value);
    if (!CSS.supports("field-sizing", "content")) {
      this.area.style.height = "auto";
      this.area.style.height = `${this.area.scrollHeight}px`;
    }
    this.actions.changed();
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
