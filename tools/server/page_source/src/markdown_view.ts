/* Shows a text that grows as Markdown: only blocks that changed are rendered, at most once per frame.
 *
 * The last blocks can still change their kind while text arrives (a paragraph becomes a table), so two are kept open; all
 * before them are final, and are not even read again. All texts together take only a part of a frame; the rest goes on in
 * the next one. */

import { codeBlock, GrowingCode } from "./code_block";
import { h } from "./dom";
import { blocks, type Links, render, type Token } from "./markdown";

const OPEN_BLOCKS = 2;
/** While it grows, code beyond this many characters is shown without colours. */
const GROWING_CODE = 6_000;
/** Milliseconds of a frame after which rendering waits for the next one. */
const SLICE = 20;
/** Of the page's time, rendering may take one part in this many. */
const SHARE = 4;

/** Texts that have to be drawn, the most urgent first. */
const waiting = new Set<MarkdownView>();
let scheduled = false;

function schedule(view: MarkdownView): void {
  waiting.add(view);
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame((now) => {
    scheduled = false;
    const end = performance.now() + SLICE;
    const views = [...waiting];
    waiting.clear();
    // What was removed from the page meanwhile is not drawn.
    for (const one of views) if (one.element.isConnected && !one.draw(now, end)) schedule(one);
  });
}

interface Shown {
  raw: string;
  element: HTMLElement;
  /** Set for code that grows without colours. */
  code: GrowingCode | null;
}

export class MarkdownView {
  readonly element = h("div", { class: "markdown" });
  private shown: Shown[] = [];
  /** Blocks that are final, and where the text after them begins. */
  private closed = 0;
  private offset = 0;
  private text = "";
  /** No more text will come. */
  private ended = false;
  /** The blocks of the whole text, once it ended and they are needed. */
  private list: ReturnType<typeof blocks> | null = null;
  private notBefore = 0;

  /** Shows `text`, which begins with what is shown already, in one of the next frames. */
  grow(text: string): void {
    if (this.ended) this.restart();
    this.text = text;
    schedule(this);
  }

  /** Shows `text`, to which nothing will be added, in the next frames. */
  finish(text: string): void {
    if (this.ended && text === this.text) return;
    this.restart();
    this.text = text;
    this.ended = true;
    schedule(this);
  }

  /** Reads the whole text again, because only that has all definitions of links. Blocks that did not change stay. */
  private restart(): void {
    this.closed = 0;
    this.offset = 0;
    this.ended = false;
    this.list = null;
    this.notBefore = 0;
  }

  /** Draws until `end`, in the frame that began at `now`; whether that was all. */
  draw(now: number, end: number): boolean {
    const begin = performance.now();
    if (now < this.notBefore || begin > end) return false;
    const list = this.list ?? blocks(this.text.slice(this.offset));
    if (this.ended) this.list = list;
    const tokens = list.filter(isShown);
    let complete = true;
    for (const [index, token] of tokens.entries()) {
      const last = index === tokens.length - 1;
      // Every call gets on by at least one block, however long it takes.
      if (this.place(this.closed + index, token, list.links, !this.ended && last) && !last && performance.now() > end) {
        complete = false;
        break;
      }
    }
    if (complete) {
      for (const { element } of this.shown.splice(this.closed + tokens.length)) element.remove();
      if (!this.ended) this.close(list);
    }
    const after = performance.now();
    if (!this.ended) this.notBefore = after + (after - begin) * (SHARE - 1);
    return complete;
  }

  /** Shows one block; false if it is shown already. */
  private place(index: number, token: Token, links: Links, growing: boolean): boolean {
    const before = this.shown[index];
    const unfinished = this.ended && before?.code;
    const linked = this.ended && Object.keys(links).length > 0 && token.type !== "code" && token.raw.includes("[");
    if (before?.raw === token.raw && !unfinished && !(linked && !before.element.dataset.linked)) return false;
    if (growing && before?.code && token.type === "code" && before.code.grow(token.text)) {
      before.raw = token.raw;
      return true;
    }
    const made = growing && token.type === "code" && token.text.length > GROWING_CODE ? growingCode(token.text, token.lang ?? "") : block(token, links);
    if (before && !made.code && renew(before.element, made.element)) made.element = before.element;
    else if (before) before.element.replaceWith(made.element);
    else this.element.append(made.element);
    if (linked) made.element.dataset.linked = "";
    this.shown[index] = { raw: token.raw, ...made };
    return true;
  }

  /** Makes all blocks final but the last ones and what follows them. */
  private close(list: Token[]): void {
    let open = 0;
    let first = list.length;
    while (first > 0 && open < OPEN_BLOCKS) {
      first -= 1;
      if (isShown(list[first] as Token)) open += 1;
    }
    for (const token of list.slice(0, first)) {
      this.offset += token.raw.length;
      if (isShown(token)) this.closed += 1;
    }
  }
}

function isShown({ type }: Token): boolean {
  return type !== "space" && type !== "def";
}

/** Moves the content of a block of code or a table into the block that is shown, which keeps its place and the focus where
 * the user scrolled it. False where the two are not of the same kind. */
function renew(shown: HTMLElement, fresh: HTMLElement): boolean {
  const [box, content] = [shown, fresh].map((element) => element.querySelector(":scope > .code code, :scope > .scroller"));
  const [name, other] = [shown, fresh].map((element) => element.querySelector(":scope > .code .code-head span")?.textContent);
  if (!box || !content || box.tagName !== content.tagName || name !== other) return false;
  box.replaceChildren(...content.childNodes);
  return true;
}

function growingCode(text: string, language: string): Pick<Shown, "element" | "code"> {
  const code = new GrowingCode(text);
  return { element: h("div", { class: "block" }, codeBlock(code.element, language)), code };
}

function block(token: Token, links: Links): Pick<Shown, "element" | "code"> {
  const element = h("div", { class: token.type === "heading" ? "block heading" : "block", dir: "auto" }, render(token, links));
  for (const code of element.querySelectorAll<HTMLElement>("pre > code")) {
    code.parentElement?.replaceWith(codeBlock(code, /language-(\S+)/.exec(code.className)?.[1] ?? ""));
  }
  for (const table of element.querySelectorAll("table")) {
    const scroller = h("div", { class: "scroller", tabindex: "0", role: "region", "aria-label": "Table" });
    table.replaceWith(scroller);
    scroller.append(table);
  }
  return { element, code: null };
}
