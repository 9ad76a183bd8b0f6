/* What the user set: sampling parameters, the default system prompt and model, the theme, the API key. In localStorage,
 * which all tabs share; the key only until the tab is closed, unless the user wants it kept. */

const PREFIX = "mlc-amd.";

/** A sampling parameter: `name` is its field in requests, an empty one leaves it to the server. */
export interface Parameter {
  name: string;
  label: string;
  hint: string;
  min: number;
  max: number;
  /** "any": fractions; 1: whole numbers. */
  step: "any" | 1;
}

export const PARAMETERS: Parameter[] = [
  { name: "temperature", label: "Temperature", hint: "0 always takes the most likely token; higher is more varied", min: 0, max: 5, step: "any" },
  { name: "top_p", label: "Top p", hint: "Only the most likely tokens that reach this probability together", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top k", hint: "Only this many of the most likely tokens; 0: all", min: 0, max: 1_000_000, step: 1 },
  { name: "min_p", label: "Min p", hint: "Only tokens at least this likely, relative to the most likely one", min: 0, max: 1, step: "any" },
  { name: "repetition_penalty", label: "Repetition penalty", hint: "Above 1 makes tokens that occurred less likely", min: 0.01, max: 10, step: "any" },
  { name: "max_tokens", label: "Max tokens", hint: "Where an answer is cut off", min: 1, max: 10_000_000, step: 1 },
  { name: "seed", label: "Seed", hint: "The same number gives the same answer again", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 },
];

/** How much a model thinks; the values are those of `reasoning_effort`. */
export const EFFORTS = ["none", "low", "medium", "high"] as const;

export const THEMES = ["system", "light", "dark"] as const;
export type Theme = (typeof THEMES)[number];

/** The values of the sampling parameters that are set. */
export function sampling(): { [name: string]: number } {
  const stored: unknown = JSON.parse(read("sampling") ?? "{}");
  const values: { [name: string]: number } = {};
  for (const { name, min, max } of PARAMETERS) {
    const value = (stored as { [name: string]: unknown } | null)?.[name];
    if (typeof value === "number" && value >= min && value <= max) values[name] = value;
  }
  return values;
}

export function setSampling(values: { [name: string]: number }): void {
  write("sampling", JSON.stringify(values));
}

/** How much the model shall think; null: what it does by itself. */
export function effort(): string | null {
  const stored = read("effort");
  return EFFORTS.find((value) => value === stored) ?? null;
}

export function setEffort(value: string | null): void {
  write("effort", value);
}

/** The system prompt of new conversations. */
export function systemPrompt(): string {
  return read("system") ?? "";
}

export function setSystemPrompt(text: string): void {
  write("system", text || null);
}

/** The model that was chosen last. */
export function lastModel(): string | null {
  return read("model");
}

export function setLastModel(id: string): void {
  write("model", id);
}

export function theme(): Theme {
  const stored = read("theme");
  return THEMES.find((value) => value === stored) ?? "system";
}

export function setTheme(value: Theme): void {
  write("theme", value === "system" ? null : value);
  applyTheme();
}

/** Makes the document light or dark. */
export function applyTheme(): void {
  const value = theme();
  if (value === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
}

export function apiKey(): string | null {
  return sessionStorage.getItem(`${PREFIX}key`) ?? read("key");
}

/** Whether the API key stays when the tab is closed. */
export function isKeyKept(): boolean {
  return read("key") !== null;
}

/** Keeps an API key: for this tab, with `keep` in this browser. Null forgets it. */
export function setApiKey(key: string | null, keep = false): void {
  sessionStorage.removeItem(`${PREFIX}key`);
  write("key", keep ? key : null);
  if (key !== null && !keep) sessionStorage.setItem(`${PREFIX}key`, key);
}

function read(name: string): string | null {
  return localStorage.getItem(PREFIX + name);
}

function write(name: string, value: string | null): void {
  if (value === null) localStorage.removeItem(PREFIX + name);
  else localStorage.setItem(PREFIX + name, value);
}
