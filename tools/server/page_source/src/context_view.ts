/* How much of the model's context the conversation takes, with what is not sent yet. */

import { h } from "./dom";
import { count } from "./figures";
import { withFiles } from "./files";
import type { Message } from "./types";

const NEARLY = 0.85;
/** Counting begins so long after the last key. */
const DELAY_MS = 300;

export class ContextView {
  private readonly bar = h("i");
  private readonly meter = h("div", { class: "meter", role: "meter", "aria-label": "Context used", "aria-valuemin": "0" }, this.bar);
  private readonly text = h("span");
  private readonly warning = h("span", { class: "warning", role: "status" });
  readonly element = h("div", { class: "context unknown" }, this.warning, this.text, this.meter);
  private timer: number | undefined;
  private last = "";

  /** `tokenize` counts tokens; it fails where the server does not. */
  constructor(private readonly tokenize: (text: string) => Promise<number>) {}

  /** Shows the use by `path`, which ends with what the server did not count yet, and by `draft`. */
  show(path: Message[], system: string, draft: string, context: number | null): void {
    const at = path.findLastIndex(({ figures }) => figures !== null && figures.promptTokens !== null);
    const figures = path[at]?.figures;
    const counted = (figures?.promptTokens ?? 0) + (figures?.tokens ?? 0);
    const later = path.slice(at + 1).map(({ text, files }) => withFiles(text, files));
    const pending = [figures ? "" : system, ...later, draft].filter(Boolean).join("\n");
    const key = JSON.stringify([counted, pending, context]);
    if (key === this.last) return;
    this.last = key;
    clearTimeout(this.timer);
    this.element.classList.toggle("unknown", context === null);
    if (context === null) return;
    if (!pending) return this.draw(counted, context);
    this.timer = setTimeout(async () => {
      const more = await this.tokenize(pending).catch(() => Math.ceil(pending.length / 4));
      if (key === this.last) this.draw(counted + more, context);
    }, DELAY_MS);
  }

  /** How much of the context a text takes, in words; "" where that is not known. */
  async share(text: string, context: number | null): Promise<string> {
    const tokens = context === null ? null : await this.tokenize(text).catch(() => null);
    return tokens === null || context === null ? "" : `${count(tokens)} tokens, ${Math.ceil((100 * tokens) / context)} % of context`;
  }

  private draw(used: number, context: number): void {
    const share = used / context;
    this.element.classList.toggle("nearly", share >= NEARLY);
    this.bar.style.width = `${Math.min(share, 1) * 100}%`;
    this.meter.setAttribute("aria-valuemax", String(context));
    this.meter.setAttribute("aria-valuenow", String(Math.min(used, context)));
    this.text.textContent = `${count(used)} of ${count(context)} tokens`;
    const warning = share < NEARLY ? "" : share < 1 ? "The context is nearly full: start a new conversation soon." : "Too long for this model: shorten it or start a new conversation.";
    if (this.warning.textContent !== warning) this.warning.textContent = warning;
  }
}
