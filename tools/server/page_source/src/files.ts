/* Text files that are attached to a message: read and checked, shown as chips, and written into the message's text. */

import { h, icon, iconButton } from "./dom";
import type { TextFile } from "./types";

/** Bytes of one file: some 250,000 tokens, more than most models' context. */
const LIMIT = 1 << 20;

/** Reads a file. Throws an Error with one line for people where its text cannot be sent. */
export async function readFile(file: File): Promise<TextFile> {
  const name = file.name.replace(/[`\s]+/g, " ").trim() || "file";
  if (file.size > LIMIT) throw new Error(`“${name}” has ${size(file.size)}: attach at most ${size(LIMIT)}, such as the part that matters.`);
  const bytes = new Uint8Array(
    await file.arrayBuffer().catch(() => {
      throw new Error(`“${name}” cannot be read: attach files, not folders.`);
    }),
  );
  const text = decoded(bytes);
  if (text === null) throw new Error(`“${name}” is not a text file: attach text, code or data saved as UTF-8.`);
  if (!text.trim()) throw new Error(`“${name}” is empty: attach a file that has text.`);
  return { name, text };
}

/** The text of a file; null: it is none. Windows' UTF-16 has a mark at its beginning. */
function decoded(bytes: Uint8Array): string | null {
  const [first, second] = bytes;
  const encoding = first === 0xff && second === 0xfe ? "utf-16le" : first === 0xfe && second === 0xff ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    return /[\x00-\x08\x0e-\x1a]/.test(text) ? null : text.replace(/\r\n?/g, "\n");
  } catch {
    return null;
  }
}

/** What the model gets: each file in a fence with its name, then the text. */
export function withFiles(text: string, files: TextFile[] | undefined): string {
  const parts = (files ?? []).map((file) => {
    const longest = Math.max(2, ...(file.text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    const kind = /\.(\w+)$/.exec(file.name)?.[1] ?? "";
    return `File \`${file.name}\`:\n${fence}${kind}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

/** A file with its name, size, and `share` of the context; with `remove` it can be removed. */
export function chip(file: TextFile, share = "", remove?: () => void): HTMLElement {
  const about = [size(new TextEncoder().encode(file.text).length), share].filter(Boolean).join(" · ");
  const label = [icon("file"), h("span", { class: "about" }, h("span", { class: "name", title: file.name }, file.name), h("small", {}, about))];
  if (remove) return h("li", { class: "chip" }, ...label, iconButton("close", `Remove ${file.name}`, remove));
  return h("details", { class: "file" }, h("summary", { class: "chip" }, ...label), h("pre", { tabindex: "0", "aria-label": file.name }, file.text));
}

function size(bytes: number): string {
  if (bytes < 1000) return `${bytes} bytes`;
  return bytes < 1_000_000 ? `${(bytes / 1024).toFixed(bytes < 10_000 ? 1 : 0)} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`;
}
