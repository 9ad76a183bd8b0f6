/* The bar above the conversation: the sidebar's switch, the model, the theme. */

import type { Model } from "./api";
import { h, icon, iconButton } from "./dom";
import { type Theme, THEMES, setTheme, theme } from "./settings";

export interface HeaderActions {
  toggleSidebar(): void;
  create(): void;
  chooseModel(id: string): void;
}

const THEME_LABELS: { [theme in Theme]: string } = { system: "automatic, as the system", light: "light", dark: "dark" };
const THEME_NAMES: { [theme in Theme]: string } = { system: "Auto", light: "Light", dark: "Dark" };

export class Header {
  readonly menu: HTMLButtonElement;
  private readonly models = h("select", { id: "model", "aria-label": "Model" });
  private readonly themeButton = h("button", { type: "button", class: "quiet theme", onclick: () => this.nextTheme() });
  readonly element: HTMLElement;

  constructor(actions: HeaderActions) {
    this.menu = iconButton("menu", "Conversations", () => actions.toggleSidebar(), { "aria-controls": "sidebar" });
    const create = iconButton("new", "New conversation (Ctrl+K)", () => actions.create(), { class: "icon narrow" });
    this.models.addEventListener("change", () => actions.chooseModel(this.models.value));
    this.element = h("header", { class: "bar" }, this.menu, this.models, h("span", { class: "space" }), this.themeButton, create);
    this.showTheme();
    addEventListener("storage", () => this.showTheme());
  }

  /** Shows the models, or `failure` in their place; `waiting`: which is no error. */
  showModels(models: Model[], chosen: string | null, failure: string | null, waiting: boolean): void {
    this.models.disabled = models.length === 0;
    this.models.title = failure ?? chosen ?? "";
    this.models.classList.toggle("failed", failure !== null && !waiting);
    const names = failure !== null || models.length === 0 ? [h("option", {}, failure ?? "No model")] : models.map(({ id }) => h("option", { value: id }, id));
    // Replacing the options would close the list while the user chooses.
    const same = names.length === this.models.options.length && names.every((name, index) => name.isEqualNode(this.models.options[index] ?? null));
    if (!same) this.models.replaceChildren(...names);
    if (failure === null && chosen !== null) this.models.value = chosen;
  }

  showTheme(): void {
    const current = theme();
    const label = `Theme: ${THEME_LABELS[current]}. Click for ${THEME_LABELS[next(current)]}`;
    this.themeButton.replaceChildren(icon(current), h("span", {}, THEME_NAMES[current]));
    this.themeButton.setAttribute("aria-label", label);
    this.themeButton.title = label;
  }

  private nextTheme(): void {
    setTheme(next(theme()));
    this.showTheme();
  }
}

function next(current: Theme): Theme {
  return THEMES[(THEMES.indexOf(current) + 1) % THEMES.length] as Theme;
}
