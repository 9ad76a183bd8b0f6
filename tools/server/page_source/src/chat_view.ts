/* The messages of the branch that is shown. The view follows a growing answer. */

import { h, iconButton } from "./dom";
import { Follower } from "./follow";
import { type MessageActions, type Place, MessageView } from "./message_view";
import type { Message } from "./types";

const SUGGESTIONS = [
  ["Explain", "how a hash table works, with a small example"],
  ["Write", "a Python function that merges two sorted lists"],
  ["Compare", "TCP and UDP in a table"],
  ["Draft", "a friendly mail that moves a meeting to Friday"],
] as const;

export class ChatView {
  private readonly list = h("div", { class: "messages" });
  private readonly welcome: HTMLElement;
  private readonly toEnd = iconButton("down", "To the end", () => this.scrollToEnd(), { class: "icon to-end" });
  private readonly scroller = h("div", { class: "scroll", tabindex: "-1" }, this.list);
  readonly element = h("section", { class: "chat", "aria-label": "Conversation" }, this.scroller, this.toEnd);
  private views = new Map<string, MessageView>();
  private readonly follower = new Follower(this.scroller, this.list, (away) => this.toEnd.classList.toggle("shown", away));

  constructor(
    private readonly actions: MessageActions,
    suggest: (text: string) => void,
  ) {
    this.welcome = h(
      "div",
      { class: "welcome" },
      h("img", { src: "icon.svg", alt: "", width: "56", height: "56" }),
      h("h1", {}, "What can I help with?"),
      h("p", {}, "The model runs on your own hardware. Conversations stay in this browser."),
      h(
        "div",
        { class: "suggestions" },
        ...SUGGESTIONS.map(([verb, rest]) =>
          h("button", { type: "button", onclick: () => suggest(`${verb} ${rest}`) }, h("strong", {}, verb), " ", rest),
        ),
      ),
    );
    // What is unfolded in finished answers is to be read: it stays where it is.
    this.list.addEventListener("click", ({ target }) => {
      if ((target as Element).closest("summary") && !this.list.querySelector(".growing")) this.follower.stay();
    });
  }

  /** Shows the messages of a branch; `place` says where each stands. */
  show(messages: Message[], place: (message: Message) => Place): void {
    const kept = new Map<string, MessageView>();
    const elements: HTMLElement[] = [];
    // The last ones are drawn first, as the end is what is seen first.
    for (const message of messages.toReversed()) {
      const view = this.views.get(message.id) ?? new MessageView(message, this.actions);
      kept.set(message.id, view);
      view.update(message, place(message));
      elements.unshift(view.element);
    }
    this.views = kept;
    const children = messages.length > 0 ? elements : [this.welcome];
    // Elements that stay are not moved: they would lose focus and selection.
    for (const child of [...this.list.children]) if (!children.includes(child as HTMLElement)) child.remove();
    children.forEach((child, index) => {
      if (this.list.children[index] !== child) this.list.insertBefore(child, this.list.children[index] ?? null);
    });
    this.element.classList.toggle("empty", messages.length === 0);
  }

  /** Shows a message that grew; false where it is not among those that are shown. */
  update(message: Message, place: Place): boolean {
    const view = this.views.get(message.id);
    view?.update(message, place);
    return view !== undefined;
  }

  edit(id: string): void {
    this.views.get(id)?.beginEdit();
  }

  scrollToEnd(): void {
    this.follower.toEnd();
  }
}
