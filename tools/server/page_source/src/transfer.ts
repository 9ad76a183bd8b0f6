/* Conversations as a JSON file, written and read. What is read may come from anywhere: every field is checked. */

import { isImageUrl } from "./images";
import type { Attachment, Conversation, Figures, Message, Record } from "./types";

const FORMAT = "mlc-amd conversations";
const VERSION = 1;
const STATES = ["done", "partial", "stopped", "failed"] as const;
const FIGURES = ["promptTokens", "cachedTokens", "tokens", "rate", "firstToken", "thinking"] as const;

/** The text of an export file. */
export function serialize(records: Record[]): string {
  return JSON.stringify({ format: FORMAT, version: VERSION, records }, null, 1);
}

/** The conversations of an export file. Throws an Error with one line for people where it is not one. */
export function parse(text: string): Record[] {
  let data: unknown;
  try {
    data = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  const { format, version, records } = object(data);
  if (format !== FORMAT || !Array.isArray(records)) throw new Error("This file holds no exported conversations.");
  if (version !== VERSION) throw new Error(`This file has version ${String(version)}, which this page cannot read.`);
  return records.map(readRecord);
}

/** Offers `text` as a download. */
export function download(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000); // the browser reads it after the click
}

function readRecord(value: unknown): Record {
  const { conversation: head, messages } = object(value);
  const fields = object(head);
  if (!Array.isArray(messages)) throw new Error("A conversation of this file has no messages.");
  const conversation: Conversation = {
    id: text(fields.id, "id"),
    title: text(fields.title, "title"),
    named: fields.named === true,
    created: number(fields.created, "created"),
    updated: number(fields.updated, "updated"),
    leaf: optional(fields.leaf, "leaf", text),
    system: text(fields.system, "system"),
    model: optional(fields.model, "model", text),
  };
  return { conversation, messages: messages.map((message) => readMessage(object(message), conversation.id)) };
}

function readMessage(fields: { [name: string]: unknown }, conversation: string): Message {
  const { role } = fields;
  if (role !== "user" && role !== "assistant") throw new Error("A message of this file has an unknown role.");
  return {
    id: text(fields.id, "id"),
    conversation,
    parent: optional(fields.parent, "parent", text),
    role,
    text: text(fields.text, "text"),
    files: Array.isArray(fields.files) ? fields.files.map(readAttachment) : [],
    thinking: text(fields.thinking, "thinking"),
    created: number(fields.created, "created"),
    model: optional(fields.model, "model", text),
    state: STATES.find((state) => state === fields.state) ?? "partial",
    finish: optional(fields.finish, "finish", text),
    error: optional(fields.error, "error", text),
    figures: fields.figures == null ? null : readFigures(object(fields.figures)),
  };
}

function readAttachment(value: unknown): Attachment {
  const fields = object(value);
  if (fields.url !== undefined) {
    const url = text(fields.url, "url");
    if (!isImageUrl(url)) throw new Error("An image of this file is none.");
    return { name: text(fields.name, "name"), url, width: number(fields.width, "width"), height: number(fields.height, "height") };
  }
  return { name: text(fields.name, "name"), text: text(fields.text, "text") };
}

function readFigures(fields: { [name: string]: unknown }): Figures {
  return Object.fromEntries(FIGURES.map((name) => [name, optional(fields[name], name, number)])) as unknown as Figures;
}

function object(value: unknown): { [name: string]: unknown } {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw new Error("This file holds no exported conversations.");
  return value as { [name: string]: unknown };
}

function text(value: unknown, name: string): string {
  if (typeof value !== "string") throw new Error(`In this file "${name}" must be text.`);
  return value;
}

function number(value: unknown, name: string): number {
  if (typeof value !== "number" || !Number.isFinite(value)) throw new Error(`In this file "${name}" must be a number.`);
  return value;
}

function optional<T>(value: unknown, name: string, read: (value: unknown, name: string) => T): T | null {
  return value === null || value === undefined ? null : read(value, name);
}
