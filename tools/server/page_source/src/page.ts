/* The page: makes the views, and turns what the user does into changes of them and of the store. */

import { Answers } from "./answers";
import { tokenize } from "./api";
import { ChatView } from "./chat_view";
import { Composer } from "./composer";
import { ContextView } from "./context_view";
import { newAnswer, newConversation, newQuestion } from "./conversations";
import { h } from "./dom";
import { withFiles } from "./files";
import { Header } from "./header";
import { KeyView } from "./key_view";
import { Library } from "./library";
import type { Place } from "./message_view";
import { Models } from "./models";
import { lastModel, setLastModel, systemPrompt } from "./settings";
import { SettingsView } from "./settings_view";
import { Sidebar } from "./sidebar";
import type { Change, Store } from "./store";
import { Toasts } from "./toast";
import { branch, descendants, leafWithout, type Messages, newestLeaf, siblings } from "./tree";
import type { Attachment, Conversation, Message } from "./types";

/** A message that another tab writes is stored every second; after this time without, that tab is gone. */
const OTHER_TAB_MS = 4000;
/** A screen reader reads at most so much of an answer. */
const SPOKEN_LENGTH = 1000;
const NARROW = matchMedia("(max-width: 52rem)");

export class Page {
  private conversations: Conversation[] = [];
  /** The conversation that is shown; null: a new one, which is stored with its first message. */
  private current: Conversation | null = null;
  private messages: Messages = new Map();
  /** The last message of the branch that is shown. Other tabs may show other branches. */
  private leaf: string | null = null;
  /** What a new conversation begins with. */
  private system = systemPrompt();
  /** When other tabs last wrote to a message. */
  private readonly elsewhere = new Map<string, number>();
  /** The answer that the server refused without a key. */
  private interrupted: Message | null = null;
  /** Messages are being stored. */
  private starting = false;

  private readonly answers: Answers;
  private readonly library: Library;
  private readonly models: Models;
  private readonly toasts = new Toasts();
  private readonly status = h("div", { class: "hidden", role: "status" });
  private readonly scrim = h("div", { class: "scrim", onclick: () => this.showSidebar(false) });
  private readonly key = new KeyView(() => this.keyChanged());
  private readonly header: Header;
  private readonly sidebar: Sidebar;
  private readonly chat: ChatView;
  private readonly composer: Composer;
  private readonly context = new ContextView((text) => tokenize(text, this.model()));
  private readonly settings: SettingsView;

  constructor(private readonly store: Store) {
    this.library = new Library(store, this.toasts);
    this.answers = new Answers(
      store,
      (message, ended) => this.answerChanged(message, ended),
      (message) => {
        this.interrupted = message;
        this.key.open(true);
      },
      (error) => this.unsaved(error),
    );
    this.models = new Models(
      () => this.showHeader(),
      () => this.key.open(true),
    );
    this.header = new Header({
      toggleSidebar: () => this.showSidebar(!this.sidebarShown),
      create: () => this.create(),
      chooseModel: (id) => void this.chooseModel(id),
    });
    this.sidebar = new Sidebar({
      create: () => this.create(),
      open: (id) => this.go(id),
      rename: (id, title) => void store.update(id, (one) => Object.assign(one, { title, named: true })),
      remove: (id) => void this.library.remove(id),
      search: (text) => store.search(text),
      settings: () => this.settings.open(),
    });
    this.chat = new ChatView(
      {
        edit: (message, text, files, resume) => void this.edit(message, text, files, resume),
        regenerate: (message) => void this.regenerate(message),
        resume: (message) => void this.resume(message),
        remove: (message) => void this.remove(message),
        alternative: (message, step) => void this.alternative(message, step),
        context: (model) => this.models.context(model),
      },
      (text) => void this.ask(null, text, []),
    );
    this.composer = new Composer({
      send: (text, files) => void this.ask(this.leaf, text, files),
      stop: () => this.stop(),
      editLast: () => this.editLast(),
      changed: () => queueMicrotask(() => this.showContext()),
      blind: () => this.blind(),
      share: (file) => this.context.share(withFiles("", [file]), this.models.context(this.model())),
    });
    this.settings = new SettingsView({
      system: () => this.current?.system ?? this.system,
      setSystem: (text) => this.setSystem(text),
      exportAll: () => void this.library.exportAll(),
      importFile: (file) => {
        this.settings.element.close(); // it would cover the message that follows
        void this.library.importFile(file);
      },
      removeAll: () => {
        this.settings.element.close();
        void this.library.removeAll();
      },
      key: () => this.key.open(false),
    });
    const main = h("main", {}, this.header.element, this.chat.element, this.composer.element, this.context.element);
    document.body.replaceChildren(this.sidebar.element, this.scrim, main, this.toasts.element, this.status, this.settings.element, this.key.element);
    this.showSidebar(!NARROW.matches);
    NARROW.addEventListener("change", () => this.showSidebar(!NARROW.matches));
    let changes = Promise.resolve();
    store.listen((change, here) => {
      // One after the other: what is read later must not be replaced by what was read before.
      changes = changes.then(() => this.changed(change, here)).catch(console.error);
    });
    addEventListener("hashchange", () => void this.openAddress());
    document.addEventListener("keydown", (event) => this.pressed(event));
  }

  async begin(): Promise<void> {
    void this.models.read();
    await this.openAddress();
    this.composer.focus();
  }

  // ---- what is shown

  /** Opens the conversation that the address names. */
  private async openAddress(): Promise<void> {
    await this.load(shownId());
    this.chat.scrollToEnd();
  }

  private go(id: string | null): void {
    if (NARROW.matches) this.showSidebar(false);
    if (shownId() === id) return;
    location.hash = id ?? "";
  }

  private create(): void {
    this.system = systemPrompt();
    this.go(null);
    this.composer.focus();
  }

  /** Reads a conversation and shows it, with the branch that ends at `leaf` where that is given. Without, a conversation
   * that is shown already keeps its branch, which follows what is added to it. */
  private async load(id: string | null, leaf?: string): Promise<void> {
    const [conversations, messages] = await Promise.all([this.store.conversations(), id ? this.store.messages(id) : []]);
    if (id !== shownId()) return; // the user went on while the store was read
    const same = this.current?.id === id;
    this.conversations = conversations;
    this.current = conversations.find((one) => one.id === id) ?? null;
    this.messages = new Map(messages.map((message) => [message.id, this.answers.newest(message)]));
    const newest = this.current?.leaf ?? null;
    const follows = !same || this.leaf === null || !this.messages.has(this.leaf) || branch(this.messages, newest).some((message) => message.id === this.leaf);
    this.leaf = leaf ?? (follows ? newest : this.leaf);
    if (!this.current && id) history.replaceState(null, "", location.pathname + location.search);
    this.show();
  }

  private show(): void {
    const title = this.current?.title;
    document.title = title ? `${title} – mlc-amd` : "mlc-amd";
    this.sidebar.show(this.conversations, this.current?.id ?? null, (id) => this.answers.in(id) !== null);
    this.chat.show(branch(this.messages, this.leaf), (message) => this.place(message));
    this.composer.setBusy(this.current !== null && this.answers.in(this.current.id) !== null);
    this.showHeader();
  }

  private showHeader(): void {
    this.header.showModels(this.models.list, this.model(), this.models.failure, this.models.waiting);
    this.showContext();
  }

  private showContext(): void {
    const { text, files } = this.composer;
    this.context.show(branch(this.messages, this.leaf), this.current?.system ?? this.system, withFiles(text, files), this.models.context(this.model()));
  }

  private place(message: Message): Place {
    const all = siblings(this.messages, message);
    const written = performance.now() - (this.elsewhere.get(message.id) ?? -Infinity) < OTHER_TAB_MS;
    return {
      number: all.findIndex(({ id }) => id === message.id) + 1,
      count: all.length,
      last: message.id === this.leaf,
      growing: this.answers.isRunning(message.id) || (message.state === "partial" && written),
      loading: this.answers.isLoading(message.id) || (this.models.isUnloaded(message.model) && !message.text && !message.thinking),
    };
  }

  private get sidebarShown(): boolean {
    return document.body.classList.contains("with-sidebar");
  }

  private showSidebar(shown: boolean): void {
    document.body.classList.toggle("with-sidebar", shown);
    this.header.menu.setAttribute("aria-expanded", String(shown));
    this.sidebar.element.inert = !shown;
    if (shown && NARROW.matches) this.sidebar.element.querySelector("button")?.focus();
  }

  // ---- what changes

  private async changed({ conversation, message: id, removed }: Change, here: boolean): Promise<void> {
    if (removed) this.answers.stopAll(conversation);
    const shown = conversation === this.current?.id;
    if (id === undefined) {
      if (here && this.starting) return; // `run` shows it, with the answer
      const before = this.messages;
      await this.load(shownId());
      if (!shown || here) return;
      for (const message of this.messages.values()) if (!before.has(message.id)) this.writtenElsewhere(message);
      this.show();
    } else if (shown && !here) {
      const message = await this.store.message(id);
      if (!message) return;
      this.answers.forget(id);
      this.messages.set(id, this.answers.newest(message));
      this.writtenElsewhere(message);
      this.show();
    }
  }

  private writtenElsewhere(message: Message): void {
    if (message.state !== "partial") return;
    this.elsewhere.set(message.id, performance.now());
    setTimeout(() => this.show(), OTHER_TAB_MS + 100); // by then it is finished, or that tab is gone
  }

  private answerChanged(message: Message, ended: boolean): void {
    if (message.conversation === this.current?.id) this.chat.update(message, this.place(message));
    if (!ended) return;
    this.show();
    if (this.models.failure !== null || this.models.context(message.model) === null) void this.models.read();
    // An error is an alert, which is announced by itself.
    if (message.conversation === this.current?.id) this.status.textContent = message.error ? "" : message.text.slice(0, SPOKEN_LENGTH);
  }

  /** Adds what the user says after `parent`, in a new conversation if there is none, and has it answered. */
  private async ask(parent: string | null, text: string, files: Attachment[]): Promise<void> {
    const conversation = this.current ?? newConversation(text || (files[0]?.name ?? ""), this.system, this.model());
    const question = newQuestion(conversation, parent, text, files);
    await this.run(conversation, [question, newAnswer(conversation, question.id, this.model())]);
  }

  private async regenerate(message: Message): Promise<void> {
    if (!this.current) return;
    // An answer that never began is not worth keeping beside the new one.
    if (!message.text && !message.thinking) await this.resume(message);
    else await this.run(this.current, [newAnswer(this.current, message.parent, this.model())]);
  }

  /** Asks again, or makes another version of an answer, which the model continues. */
  private async edit(message: Message, text: string, files: Attachment[], resume: boolean): Promise<void> {
    if (message.role === "user") return this.ask(message.parent, text, files);
    if (!this.current) return;
    const edited = { ...newAnswer(this.current, message.parent, this.model(), text), thinking: message.thinking };
    if (resume) return this.run(this.current, [edited]);
    this.stop();
    await this.store.add([{ ...edited, state: "done" }], null).catch((error) => this.unsaved(error));
    await this.load(this.current.id, edited.id);
  }

  /** Removes a message and what follows it. */
  private async remove(message: Message): Promise<void> {
    const conversation = this.current;
    if (!conversation) return;
    const removed = descendants(this.messages, message);
    const leaf = leafWithout(this.messages, message);
    if (leaf === null) return this.library.remove(conversation.id);
    const before = this.leaf ?? leaf;
    for (const { id } of removed) this.answers.remove(id);
    await this.library.removeMessages({ conversation, messages: removed }, leaf, () => {
      void this.store.update(conversation.id, (one) => Object.assign(one, { leaf: before }));
      if (this.current?.id === conversation.id) this.leaf = before;
    });
  }

  /** Continues an answer where it ends; an earlier one as another version, so that what follows it stays. */
  private async resume(message: Message): Promise<void> {
    const conversation = this.current;
    if (!conversation) return;
    if (message.id !== this.leaf) return this.edit(message, message.text, [], true);
    this.stop();
    message.model = this.model();
    const done = this.answers.start(branch(this.messages, message.parent), conversation.system, message);
    this.show();
    await done;
  }

  /** Stores messages of which the last is the answer, and fills that. */
  private async run(conversation: Conversation, added: [Message, ...Message[]]): Promise<void> {
    if (this.starting) return;
    this.starting = true;
    this.stop();
    const created = conversation.id === this.current?.id ? null : conversation;
    try {
      await this.store.add(added, created);
    } catch (error) {
      this.starting = false;
      const [first] = added;
      if (first.role === "user") this.composer.putBack(first.text, first.files ?? []);
      return this.unsaved(error);
    }
    const answer = added.at(-1) as Message;
    const all = new Map((await this.store.messages(conversation.id)).map((message) => [message.id, message]));
    const done = this.answers.start(branch(all, answer.parent), conversation.system, answer);
    this.starting = false;
    this.status.textContent = "The answer is being written.";
    if (created) history.pushState(null, "", `#${created.id}`);
    await this.load(conversation.id, answer.id);
    this.chat.scrollToEnd();
    await done;
  }

  private async alternative(message: Message, step: number): Promise<void> {
    const all = siblings(this.messages, message);
    const chosen = all[all.findIndex(({ id }) => id === message.id) + step];
    if (!chosen) return;
    const leaf = newestLeaf(this.messages, chosen).id;
    this.leaf = leaf;
    this.show();
    await this.store.update(message.conversation, (conversation) => Object.assign(conversation, { leaf }));
  }

  private unsaved(error: unknown): void {
    const full = error instanceof DOMException && error.name === "QuotaExceededError";
    const why = full ? "this browser keeps no more, delete conversations that have images" : String(error);
    this.toasts.show(`The conversation could not be saved: ${why}`);
  }

  /** Ends the answer in the conversation that is shown. */
  private stop(): void {
    const message = this.current && this.answers.in(this.current.id);
    if (message) this.answers.stop(message.id);
  }

  private editLast(): void {
    if (!this.current) return;
    const last = branch(this.messages, this.leaf).findLast(({ role }) => role === "user");
    if (last) this.chat.edit(last.id);
  }

  /** The model that answers next. */
  private model(): string | null {
    return this.models.choose(this.current?.model ?? null, lastModel());
  }

  private blind(): string {
    const model = this.model();
    return this.models.isBlind(model) ? `${model} takes no images: choose a model that does, or start the server with the model's mmproj file.` : "";
  }

  private async chooseModel(model: string): Promise<void> {
    setLastModel(model);
    if (this.current) await this.store.update(this.current.id, (conversation) => Object.assign(conversation, { model }));
  }

  private setSystem(text: string): void {
    if (!this.current) this.system = text;
    else if (text !== this.current.system) void this.store.update(this.current.id, (conversation) => Object.assign(conversation, { system: text }));
  }

  private keyChanged(): void {
    void this.models.read();
    const message = this.interrupted;
    this.interrupted = null;
    if (message && message.conversation === this.current?.id) void this.resume(message);
  }

  private pressed(event: KeyboardEvent): void {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
      event.preventDefault();
      this.create();
    } else if (event.key === "Escape") {
      if (NARROW.matches && this.sidebarShown) {
        this.showSidebar(false);
        this.header.menu.focus();
      } else this.stop();
    }
  }
}

/** The id of the conversation in the address. */
function shownId(): string | null {
  return location.hash.slice(1) || null;
}
