/* The figures of an answer as text. */

import type { Figures } from "./types";

/** Short, for the line below the answer, in parts. */
export function summary(figures: Figures): string[] {
  const { tokens, rate, firstToken } = figures;
  return [
    rate === null ? "" : `${rate < 10 ? rate.toFixed(1) : rate.toFixed(0)} tokens/s`,
    tokens === null ? "" : `${count(tokens)} ${tokens === 1 ? "token" : "tokens"}`,
    firstToken === null ? "" : `first after ${seconds(firstToken)}`,
  ].filter(Boolean);
}

/** All, for its tooltip; `context`: how many tokens fit. */
export function details(figures: Figures, model: string | null, context: number | null): string {
  const { promptTokens, cachedTokens, tokens } = figures;
  const lines = [model ?? ""];
  if (promptTokens !== null) {
    lines.push(`Prompt: ${count(promptTokens)} tokens${cachedTokens ? `, ${count(cachedTokens)} of them in the cache` : ""}`);
    const used = promptTokens + (tokens ?? 0);
    if (context) lines.push(`Context: ${count(used)} of ${count(context)} tokens`);
  }
  return lines.filter(Boolean).join("\n");
}

export function seconds(milliseconds: number): string {
  const value = milliseconds / 1000;
  return value < 60 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : `${Math.floor(value / 60)} min ${Math.round(value % 60)} s`;
}

export function count(value: number): string {
  return value.toLocaleString("en");
}
