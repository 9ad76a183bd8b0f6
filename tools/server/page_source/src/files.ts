/* Files that are attached to a message, texts and images: read and checked, shown, and texts written into the message. */

import { h, icon, iconButton } from "./dom";
import { isPicture, readImage, thumbnail } from "./images";
import type { Attachment, TextFile } from "./types";

/** Bytes of one text: some 250,000 tokens, more than most models' context. */
const LIMIT = 1 << 20;

/** Reads a file. Throws an Error with one line for people where its text cannot be sent. */
export async function readFile(file: File): Promise<Attachment> {
  const name = file.name.replace(/[`\s]+/g, " ").trim() || "file";
  if (isPicture(file)) return readImage(file, name);
  if (file.size > LIMIT) throw new Error(`“${name}” has ${size(file.size)}: attach at most ${size(LIMIT)}, such as the part that matters.`);
  const bytes = new Uint8Array(
    await file.arrayBuffer().catch(() => {
      throw new Error(`“${name}” cannot be read: attach files, not folders.`);
    }),
  );
  const text = decoded(bytes);
  if (text === null) throw new Error(`“${name}” is neither a text file nor an image: attach text, code or data saved as UTF-8, or a PNG, JPEG, WebP or GIF file.`);
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

/** What the model gets besides images: each text file in a fence with its name, then the text. */
export function withFiles(text: string, files: Attachment[] | undefined): string {
  const texts = (files ?? []).filter((file) => "text" in file);
  const parts = texts.map((file) => {
    const longest = Math.max(2, ...(file.text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    const kind = /\.(\w+)$/.exec(file.name)?.[1] ?? "";
    return `File \`${file.name}\`:\n${fence}${kind}\n${file.text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

/** A file, of text with its size and `share` of the context; with `remove` it can be removed. */
export function shown(file: Attachment, share = "", remove?: () => void): HTMLElement {
  return "url" in file ? thumbnail(file, remove) : chip(file, share, remove);
}

function chip(file: TextFile, share: string, remove?: () => void): HTMLElement {
  const about = [size(new TextEncoder().encode(file.text).length), share].filter(Boolean).join(" · ");
  const label = [icon("file"), h("span", { class: "about" }, h("span", { class: "name", title: file.name }, file.name), h("small", {}, about))];
  if (remove) return h("li", { class: "chip" }, ...label, iconButton("close", `Remove ${file.name}`, remove));
  return h("details", { class: "file" }, h("summary", { class: "chip" }, ...label), h("pre", { tabindex: "0", "aria-label": file.name }, file.text));
}

function size(bytes: number): string {
  if (bytes < 1000) return `${bytes} bytes`;
  return bytes < 1_000_000 ? `${(bytes / 1024).toFixed(bytes < 10_000 ? 1 : 0)} KiB` : `${(bytes / (1 << 20)).toFixed(1)} MiB`;
}
