/* The list of conversations: new, search, open, rename, remove. */

import { h, icon, iconButton } from "./dom";
import type { Conversation } from "./types";

export interface SidebarActions {
  create(): void;
  open(id: string): void;
  rename(id: string, title: string): void;
  remove(id: string): void;
  search(text: string): Promise<Set<string>>;
  settings(): void;
}

const DAY = 86_400_000;
const SEARCH_DELAY = 150;

export class Sidebar {
  private readonly query = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations" });
  private readonly list = h("nav", { class: "conversations", "aria-label": "Conversations" });
  readonly element: HTMLElement;
  private conversations: Conversation[] = [];
  private current: string | null = null;
  private busy: (id: string) => boolean = () => false;
  /** The conversations that were found; null: there is no search. */
  private found: Set<string> | null = null;
  private renaming = false;

  constructor(private readonly actions: SidebarActions) {
    const create = h(
      "button",
      { type: "button", class: "button new", title: "New conversation (Ctrl+K)", onclick: () => actions.create() },
      icon("new"),
      "New conversation",
    );
    const settings = h("button", { type: "button", class: "quiet wide", onclick: () => actions.settings() }, icon("settings"), "Settings");
    this.element = h(
      "aside",
      { class: "sidebar", id: "sidebar", "aria-label": "Conversations and settings" },
      create,
      h("div", { class: "search" }, icon("search"), this.query),
      this.list,
      settings,
    );
    let timer = 0;
    this.query.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => void this.search(), SEARCH_DELAY);
    });
  }

  show(conversations: Conversation[], current: string | null, busy: (id: string) => boolean): void {
    this.conversations = conversations;
    this.current = current;
    this.busy = busy;
    this.draw();
  }

  private async search(): Promise<void> {
    const text = this.query.value.trim();
    const found = text ? await this.actions.search(text) : null;
    if (text !== this.query.value.trim()) return; // the user went on typing
    this.found = found;
    this.draw();
  }

  private draw(): void {
    if (this.renaming) return;
    const focused = document.activeElement;
    const focus = focused instanceof HTMLElement && this.list.contains(focused) ? focused.dataset.focus : undefined;
    const shown = this.conversations.filter(({ id }) => !this.found || this.found.has(id));
    const groups = new Map<string, Conversation[]>();
    for (const one of shown) groups.set(age(one.updated), [...(groups.get(age(one.updated)) ?? []), one]);
    const empty = this.found ? "Nothing found." : "Your conversations appear here.";
    this.list.replaceChildren(
      ...[...groups].map(([name, members]) => h("section", {}, h("h2", {}, name), h("ul", {}, ...members.map((one) => this.item(one))))),
      ...(shown.length === 0 ? [h("p", { class: "hint" }, empty)] : []),
    );
    if (focus) this.list.querySelector<HTMLElement>(`[data-focus="${CSS.escape(focus)}"]`)?.focus();
  }

  private item({ id, title }: Conversation): HTMLElement {
    const current = id === this.current;
    const open = h(
      "button",
      {
        type: "button",
        class: "open",
        title,
        "data-focus": `open ${id}`,
        ...(current ? { "aria-current": "page" } : {}),
        onclick: () => this.actions.open(id),
        ondblclick: () => this.rename(item, id, title),
      },
      title,
      ...(this.busy(id) ? [h("i", { class: "busy", title: "An answer is being written" })] : []),
    );
    const rename = iconButton("edit", `Rename “${title}”`, () => this.rename(item, id, title), { "data-focus": `rename ${id}` });
    const remove = iconButton("remove", `Delete “${title}”`, () => this.actions.remove(id), { "data-focus": `remove ${id}` });
    const item = h("li", { class: current ? "current" : "" }, open, h("span", { class: "tools" }, rename, remove));
    return item;
  }

  private rename(item: HTMLElement, id: string, title: string): void {
    if (this.renaming) return;
    this.renaming = true;
    const input = h("input", { type: "text", "aria-label": "Title", maxlength: "200" });
    input.value = title;
    const end = (keep: boolean) => {
      if (!this.renaming) return;
      this.renaming = false;
      const changed = input.value.trim();
      this.draw();
      this.list.querySelector<HTMLElement>(`[data-focus="rename ${CSS.escape(id)}"]`)?.focus();
      if (keep && changed && changed !== title) this.actions.rename(id, changed);
    };
    input.addEventListener("blur", () => end(true));
    input.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") {
        event.stopPropagation();
        end(false);
      }
    });
    item.replaceChildren(input);
    input.focus();
    input.select();
  }
}

/** The group of a conversation that changed at this time. */
function age(updated: number): string {
  const midnight = new Date().setHours(0, 0, 0, 0);
  if (updated >= midnight) return "Today";
  if (updated >= midnight - DAY) return "Yesterday";
  if (updated >= midnight - 7 * DAY) return "Last 7 days";
  if (updated >= midnight - 30 * DAY) return "Last 30 days";
  return "Older";
}
