/* One message: its text, thinking, state, figures and actions. */

import { KEY_WANTED } from "./api";
import { copyButton } from "./clipboard";
import { h, icon, iconButton } from "./dom";
import { details, seconds, summary } from "./figures";
import { shown as shownFile, withFiles } from "./files";
import { Follower } from "./follow";
import { MarkdownView } from "./markdown_view";
import type { Attachment, Message } from "./types";

export interface MessageActions {
  /** `resume`: of an answer, the model continues it. */
  edit(message: Message, text: string, files: Attachment[], resume: boolean): void;
  regenerate(message: Message): void;
  resume(message: Message): void;
  /** Also removes what follows. */
  remove(message: Message): void;
  /** Shows the alternative that is `step` further. */
  alternative(message: Message, step: number): void;
  /** How many tokens fit the context of a model, where that is known. */
  context(model: string | null): number | null;
}

/** The place of a message among its alternatives. */
export interface Place {
  number: number;
  count: number;
  /** It is the last one of the branch. */
  last: boolean;
  /** It is being written: by this tab, or by another one. */
  growing: boolean;
  /** The model is being loaded for it. */
  loading: boolean;
}

export class MessageView {
  readonly element: HTMLElement;
  private readonly body = h("div", { class: "body" });
  private readonly plain = h("div", { class: "plain", dir: "auto" });
  private readonly foot = h("div", { class: "foot" });
  private readonly note = h("div", { class: "note" });
  private readonly markdown: MarkdownView | null;
  private readonly thinking: ThinkingView | null;
  private footed = "";

  constructor(
    private message: Message,
    private readonly actions: MessageActions,
  ) {
    const mine = message.role === "user";
    this.markdown = mine ? null : new MarkdownView();
    this.thinking = mine ? null : new ThinkingView();
    if (this.thinking) this.body.append(this.thinking.element);
    this.body.append(...(message.files ?? []).map((file) => shownFile(file)), this.markdown?.element ?? this.plain);
    this.element = h(
      "article",
      { class: `message ${message.role}`, "aria-label": mine ? "You" : "Assistant", "data-id": message.id },
      this.body,
      this.note,
      this.foot,
    );
  }

  /** Shows the message as it is now. */
  update(message: Message, place: Place): void {
    this.message = message;
    const ended = !place.growing;
    this.element.classList.toggle("last", place.last);
    this.element.classList.toggle("growing", place.growing);
    if (this.markdown && this.thinking) {
      this.thinking.update(message, place.growing);
      if (ended) this.markdown.finish(message.text);
      else this.markdown.grow(message.text);
    } else if (this.plain.textContent !== message.text) this.plain.textContent = message.text;
    const footed = JSON.stringify([place, message.state, message.error, message.finish, message.figures]);
    if (footed === this.footed) return;
    this.footed = footed;
    this.note.replaceChildren(...(ended ? this.notes(place) : []));
    // The dots are where the buttons will be, so that the end of an answer moves nothing.
    this.foot.replaceChildren(...(ended ? this.tools(place) : [waiting(), ...(place.loading ? [h("span", {}, "Loading model…")] : [])]));
  }

  /** The user edits the text in place. */
  beginEdit(): void {
    if (this.element.classList.contains("editing")) return;
    const mine = this.message.role === "user";
    const area = h("textarea", { "aria-label": mine ? "Edit the message" : "Edit the answer", rows: "1", dir: "auto" });
    area.value = this.message.text;
    const shown = [...this.body.childNodes];
    let files = this.message.files ?? [];
    const chips = h("ul", { class: "chips" });
    const showChips = () => {
      const remove = (file: Attachment) => {
        files = files.filter((other) => other !== file);
        showChips();
        area.focus();
      };
      chips.replaceChildren(...files.map((file) => shownFile(file, "", () => remove(file))));
      chips.hidden = files.length === 0;
    };
    showChips();
    const end = () => {
      this.element.classList.remove("editing");
      this.body.replaceChildren(...shown);
      this.element.querySelector<HTMLElement>(".edit")?.focus();
    };
    const save = (resume: boolean) => {
      // White space at the end of an answer is part of what is continued.
      const text = mine ? area.value.trim() : area.value;
      if (!text.trim() && files.length === 0) return;
      end();
      this.actions.edit(this.message, text, files, resume);
    };
    const button = (label: string, onclick: () => void, kind = "") => h("button", { type: "button", class: `button ${kind}`, onclick }, label);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches) {
        if (!mine) return; // lines of an answer
        event.preventDefault();
        save(false);
      }
    });
    this.element.classList.add("editing");
    const buttons = mine
      ? [button("Send", () => save(false), "primary")]
      : [button("Save", () => save(false)), button("Save and continue", () => save(true), "primary")];
    this.body.replaceChildren(chips, area, h("div", { class: "row" }, button("Cancel", end), ...buttons));
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }

  private notes(place: Place): Node[] {
    const { message } = this;
    if (message.role === "user") return [];
    const again = h("button", { type: "button", class: "button", onclick: () => this.actions.regenerate(message) }, "Try again");
    const more = h("button", { type: "button", class: "button", onclick: () => this.actions.resume(message) }, "Continue");
    const buttons = !place.last ? [] : message.text && message.state !== "done" ? [more, again] : [again];
    if (message.state === "failed") return [alert(message.error === KEY_WANTED ? "info" : "error", message.error ?? "The answer failed.", buttons)];
    if (message.state === "partial") return [alert("info", "This answer was interrupted.", buttons)];
    const next = place.last ? [message.text ? more : again] : [];
    if (message.state === "stopped") return [alert("info", "Stopped.", next)];
    if (this.isFull) return [alert("info", "The answer reached the end of the model's context.", [])];
    if (message.finish === "length") return [alert("info", "The answer reached its limit of tokens.", next)];
    if (!message.text) return [alert("info", "The model gave no answer.", buttons)];
    return [];
  }

  /** The answer ended because no more tokens fit. */
  private get isFull(): boolean {
    const { figures, finish, model } = this.message;
    const context = this.actions.context(model);
    return finish === "length" && !!figures && !!context && (figures.promptTokens ?? 0) + (figures.tokens ?? 0) >= context - 1;
  }

  private tools(place: Place): Node[] {
    const { message } = this;
    const made: Node[] = [];
    if (place.count > 1) {
      const previous = iconButton("left", "Previous version", () => this.actions.alternative(message, -1));
      const next = iconButton("right", "Next version", () => this.actions.alternative(message, 1));
      previous.disabled = place.number === 1;
      next.disabled = place.number === place.count;
      const label = h("span", { "aria-label": `Version ${place.number} of ${place.count}` }, `${place.number}/${place.count}`);
      made.push(h("span", { class: "versions" }, previous, label, next));
    }
    const mine = message.role === "user";
    const whole = withFiles(message.text, message.files);
    if (whole) made.push(copyButton("Copy the message", () => whole));
    if (whole || message.files?.length) made.push(iconButton("edit", mine ? "Edit the message" : "Edit the answer", () => this.beginEdit(), { class: "icon edit" }));
    // Where there is no answer, or it is not complete, the note above has the buttons.
    if (!mine && message.text) {
      made.push(iconButton("again", "Regenerate the answer", () => this.actions.regenerate(message)));
      const noted = place.last && (message.state !== "done" || message.finish === "length");
      if (!noted && !this.isFull) made.push(iconButton("more", "Continue the answer", () => this.actions.resume(message)));
    }
    made.push(iconButton("remove", mine ? "Delete the message" : "Delete the answer", () => this.actions.remove(message)));
    const { figures } = message;
    const text = figures ? summary(figures).flatMap((part, index) => [index ? " · " : "", h("span", {}, part)]) : [];
    if (figures && text.length > 0) {
      made.push(h("span", { class: "figures", title: details(figures, message.model, this.actions.context(message.model)) }, ...text));
    }
    return made;
  }
}

/** What the model thinks, folded. */
class ThinkingView {
  private readonly text = document.createTextNode("");
  private readonly caption = h("span");
  readonly element: HTMLElement;

  constructor() {
    const content = h("div", {}, this.text);
    const box = h("div", { class: "thoughts", tabindex: "0", role: "region", "aria-label": "Thoughts" }, content);
    new Follower(box, content);
    this.element = h("details", { class: "thinking", hidden: true }, h("summary", {}, icon("right"), this.caption), box);
  }

  update(message: Message, growing: boolean): void {
    this.element.hidden = !message.thinking;
    const { thinking } = message;
    if (thinking.startsWith(this.text.data)) this.text.appendData(thinking.slice(this.text.length));
    else this.text.data = thinking;
    const active = growing && !message.text;
    const time = message.figures?.thinking ?? null;
    const caption = active ? "Thinking…" : time === null ? "Thoughts" : `Thought for ${seconds(time)}`;
    if (this.caption.textContent !== caption) this.caption.textContent = caption;
    this.element.classList.toggle("active", active);
  }
}

function waiting(): HTMLElement {
  return h("div", { class: "waiting", "aria-hidden": "true" }, h("i"), h("i"), h("i"));
}

function alert(kind: "error" | "info", text: string, buttons: Node[]): HTMLElement {
  return h("div", { class: `alert ${kind}`, ...(kind === "error" ? { role: "alert" } : {}) }, h("span", {}, text), ...buttons);
}
