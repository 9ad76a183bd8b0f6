/* Code to HTML with classes for its colours, by highlight.js's common languages. */

import hljs from "highlight.js/lib/common";
import { escapeHtml } from "./escape";

/** Beyond this many characters code is not highlighted: it would delay the page. */
const LIMIT = 60_000;

/** `code` as HTML. Only the language that the text names is used: guessing is slow and often wrong. */
export function highlight(code: string, language: string): string {
  if (code.length > LIMIT || !hljs.getLanguage(language)) return escapeHtml(code);
  return hljs.highlight(code, { language, ignoreIllegals: true }).value;
}
