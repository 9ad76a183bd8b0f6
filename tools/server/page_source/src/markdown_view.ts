/* Shows a text that grows as Markdown: only blocks that changed are rendered, at most once per frame.
 *
 * The last blocks can still change their kind while text arrives (a paragraph becomes a table), so two are kept open; all
 * before them are final, and are not even read again. What takes longer than a part of a frame goes on in the next one. */

import { codeBlock, GrowingCode } from "./code_block";
import { h } from "./dom";
import { blocks, type Links, render, type Token } from "./markdown";

const OPEN_BLOCKS = 2;
/** While it grows, code beyond this many characters is shown without colours. */
const GROWING_CODE = 6_000;
/** Milliseconds after which rendering waits for the next frame. */
const SLICE = 20;
/** Of the page's time, rendering may take one part in this many. */
const SHARE = 4;

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
  /** The blocks of the whole text, once it ended. */
  private list: ReturnType<typeof blocks> | null = null;
  private scheduled: number | null = null;
  private notBefore = 0;

  /** `onRender` is called after what is shown changed. */
  constructor(private readonly onRender: () => void) {}

  /** Shows `text`, which begins with what is shown already, in one of the next frames. */
  grow(text: string): void {
    if (this.ended) this.restart();
    this.text = text;
    this.schedule();
  }

  /** Shows `text`, to which nothing will be added: as much as is quick now, the rest in the next frames. */
  finish(text: string): void {
    if (this.ended && text === this.text) return;
    this.restart();
    this.text = text;
    this.ended = true;
    this.list = blocks(text);
    this.draw();
  }

  /** Reads the whole text again, because only that has all definitions of links. Blocks that did not change stay. */
  private restart(): void {
    this.closed = 0;
    this.offset = 0;
    this.ended = false;
    this.list = null;
    this.notBefore = 0;
  }

  private schedule(): void {
    this.scheduled ??= requestAnimationFrame((now) => {
      this.scheduled = null;
      if (now < this.notBefore) this.schedule();
      else this.draw();
    });
  }

  private draw(): void {
    const begin = performance.now();
    const list = this.list ?? blocks(this.text.slice(this.offset));
    const tokens = list.filter(isShown);
    let complete = true;
    for (const [index, token] of tokens.entries()) {
      if (performance.now() - begin > SLICE && index + 1 < tokens.length) {
        complete = false;
        break;
      }
      this.place(this.closed + index, token, list.links, !this.ended && index === tokens.length - 1);
    }
    if (complete) {
      for (const { element } of this.shown.splice(this.closed + tokens.length)) element.remove();
      if (!this.ended) this.close(list);
    }
    this.onRender();
    const end = performance.now();
    if (!this.ended) this.notBefore = end + (end - begin) * (SHARE - 1);
    if (!complete) this.schedule();
  }

  /** Shows one block, where it is not shown yet. */
  private place(index: number, token: Token, links: Links, growing: boolean): void {
    const before = this.shown[index];
    const unfinished = this.ended && before?.code;
    const linked = this.ended && Object.keys(links).length > 0 && token.type !== "code" && token.raw.includes("[");
    if (before?.raw === token.raw && !unfinished && !(linked && !before.element.dataset.linked)) return;
    if (growing && before?.code && token.type === "code" && before.code.grow(token.text)) {
      before.raw = token.raw;
      return;
    }
    const made = growing && token.type === "code" && token.text.length > GROWING_CODE ? growingCode(token.text, token.lang ?? "") : block(token, links);
    if (linked) made.element.dataset.linked = "";
    if (before) before.element.replaceWith(made.element);
    else this.element.append(made.element);
    this.shown[index] = { raw: token.raw, ...made };
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

function growingCode(text: string, language: string): Pick<Shown, "element" | "code"> {
  const code = new GrowingCode(text);
  return { element: h("div", { class: "block" }, codeBlock(code.element, language)), code };
}

function block(token: Token, links: Links): Pick<Shown, "element" | "code"> {
  const element = h("div", { class: token.type === "heading" ? "block heading" : "block" }, render(token, links));
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
