/* Markdown to safe elements: blocks of a text, and what each becomes.
 *
 * HTML in the text is shown as text, except for a few tags without attributes; links and images keep only addresses that
 * cannot run anything; what results still passes through DOMPurify. Nothing else in the page makes elements of text. */

import DOMPurify from "dompurify";
import { Marked, type Token, type TokenizerAndRendererExtension, type Tokens, type TokensList } from "marked";
import { escapeHtml } from "./escape";
import { highlight } from "./highlight";
import { toMathML } from "./math";

/** Tags that models write between Markdown, and that are kept where they have no attributes. */
const KEPT_TAGS = /&lt;(\/?(?:br|sub|sup|kbd|b|i|u|s|em|strong|mark|details|summary|hr)\s*\/?)&gt;/gi;
const WEB_ADDRESS = /^(?:https?:|mailto:)/i;
const DATA_IMAGE = /^data:image\/(?:png|jpeg|gif|webp);base64,/i;

/** Attributes that hold no address. */
const PLAIN_ATTRIBUTES = (
  "title target rel alt class start align " +
  "display mathvariant stretchy fence accent columnalign width linethickness"
).split(" ");

const SANITIZER = {
  ALLOWED_TAGS: (
    "h1 h2 h3 h4 h5 h6 p br hr ul ol li blockquote pre code span strong em b i u s del mark sub sup kbd a img " +
    "table thead tbody tr th td details summary " +
    "math mrow mi mo mn mtext mspace msup msub msubsup mfrac msqrt mroot munder mover munderover mtable mtr mtd"
  ).split(" "),
  ALLOWED_ATTR: [...PLAIN_ATTRIBUTES, "href", "src"],
  // The values of all other attributes are taken for addresses.
  ADD_URI_SAFE_ATTR: PLAIN_ATTRIBUTES,
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|data:image\/)/i,
  RETURN_DOM_FRAGMENT: true as const,
};

const math: TokenizerAndRendererExtension[] = [
  formula("math-block", "block", /^(?:\$\$([\s\S]+?)\$\$|\\\[([\s\S]+?)\\\])[ \t]*(?:\n|$)/, null, true),
  formula("math-display", "inline", /^(?:\$\$([^$]+?)\$\$|\\\[([\s\S]+?)\\\])/, /\$\$|\\\[/, true),
  // $: not before or after a space, nor before a digit, so that prices stay prices
  formula("math-inline", "inline", /^(?:\$(?![\s$])((?:\\.|[^$\\\n])*?[^\s\\$]|[^\s\\$])\$(?![\d$])|\\\(([\s\S]+?)\\\))/, /\$|\\\(/, false),
];

const parser = new Marked({
  gfm: true,
  breaks: true,
  extensions: math,
  renderer: {
    code({ text, lang }) {
      const language = /^[\w+#.-]+/.exec(lang ?? "")?.[0] ?? "";
      return `<pre><code class="language-${escapeHtml(language)}">${highlight(text, language)}</code></pre>`;
    },
    html({ text }) {
      return escapeHtml(text).replace(KEPT_TAGS, "<$1>");
    },
    link({ href, title, tokens }) {
      const content = this.parser.parseInline(tokens);
      if (!WEB_ADDRESS.test(href)) return content;
      const hint = title ? ` title="${escapeHtml(title)}"` : "";
      return `<a href="${escapeHtml(href)}"${hint} target="_blank" rel="noopener noreferrer">${content}</a>`;
    },
    image({ href, text }) {
      // Images of other servers are not loaded, as that would tell them what is read here.
      if (DATA_IMAGE.test(href)) return `<img src="${escapeHtml(href)}" alt="${escapeHtml(text)}">`;
      if (!WEB_ADDRESS.test(href)) return escapeHtml(text);
      return `<a href="${escapeHtml(href)}" target="_blank" rel="noopener noreferrer">${escapeHtml(text || href)}</a>`;
    },
    listitem({ task, tokens }) {
      return `<li${task ? ' class="task"' : ""}>${this.parser.parse(tokens)}</li>\n`;
    },
    checkbox({ checked }) {
      return checked ? "☑ " : "☐ ";
    },
  },
});

export type { Token };
export type Links = TokensList["links"];

/** The blocks of a text: paragraphs, lists, code, ... Their `raw` texts together are `text`. */
export function blocks(text: string): TokensList {
  return parser.lexer(text);
}

/** The elements of one block. */
export function render(block: Token, links: Links): DocumentFragment {
  const list = Object.assign([block], { links });
  return DOMPurify.sanitize(parser.parser(list), SANITIZER);
}

function formula(name: string, level: "block" | "inline", pattern: RegExp, begin: RegExp | null, display: boolean): TokenizerAndRendererExtension {
  return {
    name,
    level,
    // Without it, a formula of its own lines has to follow an empty line, and the text is not searched at every block.
    start: begin ? (source) => begin.exec(source)?.index : undefined,
    tokenizer: (source): Tokens.Generic | undefined => {
      const found = pattern.exec(source);
      return found ? { type: name, raw: found[0], text: found[1] ?? found[2] ?? "" } : undefined;
    },
    renderer: (token) => {
      const source = String((token as Tokens.Generic).text);
      return toMathML(source, display) ?? `<code>${escapeHtml(source)}</code>`;
    },
  };
}
