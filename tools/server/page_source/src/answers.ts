/* Answers in progress: asks the server, writes what arrives into messages and keeps them in the store.
 *
 * An answer goes on when another conversation is shown. Whatever arrived is kept, however it ends. */

import { ApiError, chat, type ChatMessage, type Part, type Piece } from "./api";
import { withFiles } from "./files";
import { effort, sampling } from "./settings";
import type { Store } from "./store";
import { type Figures, imagesOf, type Message } from "./types";

/** How often a growing message is stored, in milliseconds. */
const SAVE_INTERVAL = 1000;

interface Running {
  controller: AbortController;
  message: Message;
}

export class Answers {
  private readonly running = new Map<string, Running>();
  /** The messages that this tab wrote: what is read from the store may be older. */
  private readonly written = new Map<string, Message>();
  private readonly removed = new Set<string>();
  /** A model is being loaded for these. */
  private readonly loading = new Set<string>();

  /** `onChange`: the message grew or ended. `onUnauthorized`: the server wants a key. */
  constructor(
    private readonly store: Store,
    private readonly onChange: (message: Message, ended: boolean) => void,
    private readonly onUnauthorized: (message: Message) => void,
    private readonly onUnsaved: (error: unknown) => void,
  ) {
    // The page may be about to close: what is on disk shall be what arrived.
    document.addEventListener("visibilitychange", () => {
      if (document.visibilityState === "hidden") for (const { message } of this.running.values()) this.save(message);
    });
  }

  /** The message that is being written in this conversation. */
  in(conversation: string): Message | null {
    for (const { message } of this.running.values()) if (message.conversation === conversation) return message;
    return null;
  }

  isRunning(id: string): boolean {
    return this.running.has(id);
  }

  /** The message as it is now: this tab's, if it wrote it last. */
  newest(stored: Message): Message {
    return this.written.get(stored.id) ?? stored;
  }

  /** Another tab wrote the message. */
  forget(id: string): void {
    if (!this.running.has(id)) this.written.delete(id);
  }

  stop(id: string): void {
    this.running.get(id)?.controller.abort();
  }

  /** Ends the answers of a conversation that is removed. */
  stopAll(conversation: string): void {
    for (const { message, controller } of this.running.values()) if (message.conversation === conversation) controller.abort();
  }

  /** Ends an answer that is removed. */
  remove(id: string): void {
    this.removed.add(id);
    this.written.delete(id);
    this.stop(id);
  }

  /** Answers the branch that ends before `message`, or continues the text that it has. */
  async start(path: Message[], system: string, message: Message): Promise<void> {
    const controller = new AbortController();
    this.running.set(message.id, { controller, message });
    this.written.set(message.id, message);
    this.removed.delete(message.id);
    Object.assign(message, { state: "partial", finish: null, error: null });
    const clock = new Clock();
    let saved = performance.now();
    let unauthorized = false;
    this.onChange(message, false);
    try {
      const chosen = effort();
      const options = { ...sampling(), ...(chosen ? { reasoning_effort: chosen } : {}) };
      const messages = request(path, system, message);
      const asked = () => chat(messages, message.model, options, controller.signal);
      for await (const piece of loaded(asked, controller.signal, (loading) => this.wait(message, loading))) {
        clock.add(piece);
        message.text += piece.text;
        message.thinking += piece.thinking;
        message.finish = piece.finish ?? message.finish;
        this.onChange(message, false);
        if (performance.now() - saved > SAVE_INTERVAL) {
          saved = performance.now();
          this.save(message);
        }
      }
      message.state = "done";
    } catch (error) {
      unauthorized = error instanceof ApiError && error.status === 401;
      message.state = controller.signal.aborted ? "stopped" : "failed";
      message.error = controller.signal.aborted ? null : error instanceof ApiError ? error.message : String(error);
    }
    message.figures = clock.figures();
    this.running.delete(message.id);
    this.loading.delete(message.id);
    this.save(message);
    this.onChange(message, true);
    if (unauthorized) this.onUnauthorized(message);
  }

  isLoading(id: string): boolean {
    return this.loading.has(id);
  }

  private wait(message: Message, loading: boolean): void {
    if (this.loading.has(message.id) === loading) return;
    if (loading) this.loading.add(message.id);
    else this.loading.delete(message.id);
    this.onChange(message, false);
  }

  private save(message: Message): void {
    if (!this.removed.has(message.id)) this.store.save(message).catch(this.onUnsaved);
  }
}

/** Measures an answer. */
class Clock {
  private readonly begin = performance.now();
  private first: number | null = null;
  private answer: number | null = null;
  private thought = false;
  private readonly last: Pick<Piece, "usage" | "timings"> = { usage: null, timings: null };

  add(piece: Piece): void {
    const now = performance.now();
    if (piece.text || piece.thinking) this.first ??= now;
    if (piece.thinking) this.thought = true;
    if (piece.text) this.answer ??= now;
    this.last.usage = piece.usage ?? this.last.usage;
    this.last.timings = piece.timings ?? this.last.timings;
  }

  /** The server's figures where it gives them. */
  figures(): Figures {
    const { usage, timings } = this.last;
    return {
      promptTokens: usage?.prompt_tokens ?? timings?.prompt_n ?? null,
      cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? timings?.cache_n ?? null,
      tokens: usage?.completion_tokens ?? timings?.predicted_n ?? null,
      rate: timings?.predicted_per_second || null,
      firstToken: this.first === null ? null : this.first - this.begin,
      thinking: this.thought && this.first !== null ? (this.answer ?? performance.now()) - this.first : null,
    };
  }
}

/** The pieces of an answer, asked for again until the server has loaded its model; `wait` says whether it is waited for. */
async function* loaded(asked: () => AsyncGenerator<Piece>, signal: AbortSignal, wait: (loading: boolean) => void): AsyncGenerator<Piece> {
  for (;;) {
    try {
      for await (const piece of asked()) {
        wait(false);
        yield piece;
      }
      return;
    } catch (error) {
      if (!(error instanceof ApiError) || error.loading === null) throw error;
      wait(true);
      await new Promise((resolve) => {
        setTimeout(resolve, error.loading ?? 0);
        signal.addEventListener("abort", resolve, { once: true });
      });
      signal.throwIfAborted();
    }
  }
}

/** A content in parts; an empty text has none. */
function parts(content: string | Part[]): Part[] {
  if (typeof content !== "string") return content;
  return content ? [{ type: "text", text: content }] : [];
}

/** The messages of a request, in each images before its text. Chat templates want users and assistants in turns, so what is empty is left out, and what
 * follows a message of the same side becomes part of it. */
function request(path: Message[], system: string, message: Message): ChatMessage[] {
  const made: ChatMessage[] = system.trim() ? [{ role: "system", content: system }] : [];
  for (const { role, text: said, files } of message.text ? [...path, message] : path) {
    const last = made.at(-1);
    const text = withFiles(said, files);
    const images = imagesOf(files).map(({ url }): Part => ({ type: "image_url", image_url: { url } }));
    const content = images.length === 0 ? text : [...images, ...parts(text)];
    if (content.length === 0) continue;
    if (last?.role !== role) made.push({ role, content });
    else if (typeof last.content === "string" && typeof content === "string") last.content += `\n\n${content}`;
    else last.content = [...parts(last.content), ...parts("\n\n"), ...parts(content)];
  }
  const last = made.at(-1);
  if (message.text && last?.role === "assistant" && message.thinking) last.reasoning_content = message.thinking;
  return made;
}
