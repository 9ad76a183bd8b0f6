/* The settings: system prompt, thinking, sampling parameters, theme, key, and the file with all conversations. */

import { h, iconButton } from "./dom";
import * as settings from "./settings";

export interface SettingsActions {
  /** The system prompt of the conversation that is shown. */
  system(): string;
  setSystem(text: string): void;
  exportAll(): void;
  importFile(file: File): void;
  removeAll(): void;
  key(): void;
}

const EFFORT_NAMES: { [value: string]: string } = { "": "The model's default", none: "Off", low: "Low", medium: "Medium", high: "High" };
const THEME_NAMES = { system: "Same as the system", light: "Light", dark: "Dark" };

export class SettingsView {
  readonly element: HTMLDialogElement;
  private readonly system = h("textarea", { id: "system", rows: "4", placeholder: "For example: Answer briefly." });
  private readonly everywhere = h("input", { type: "checkbox", id: "system-default" });
  private readonly effort = select("effort", EFFORT_NAMES);
  private readonly theme = select("theme", THEME_NAMES);
  private readonly inputs = new Map<string, HTMLInputElement>();

  constructor(private readonly actions: SettingsActions) {
    for (const { name, min, max, step } of settings.PARAMETERS) {
      const input = h("input", { type: "number", id: name, min: String(min), max: String(max), step: String(step), placeholder: "default" });
      input.setAttribute("aria-describedby", `${name}-hint`);
      input.addEventListener("change", () => this.keepSampling());
      this.inputs.set(name, input);
    }
    const file = h("input", { type: "file", accept: "application/json,.json", class: "hidden", tabindex: "-1", "aria-label": "File to import" });
    file.addEventListener("change", () => {
      const [chosen] = file.files ?? [];
      if (chosen) actions.importFile(chosen);
      file.value = "";
    });
    this.system.addEventListener("change", () => this.keepSystem());
    this.everywhere.addEventListener("change", () => this.keepSystem());
    this.effort.addEventListener("change", () => settings.setEffort(this.effort.value || null));
    this.theme.addEventListener("change", () => settings.setTheme(this.theme.value as settings.Theme));
    const button = (label: string, onclick: () => void, kind = "") => h("button", { type: "button", class: `button ${kind}`, onclick }, label);
    this.element = h(
      "dialog",
      { class: "sheet", "aria-labelledby": "settings-title" },
      h("header", {}, h("h2", { id: "settings-title" }, "Settings"), iconButton("close", "Close", () => this.element.close())),
      h(
        "div",
        { class: "sheet-body" },
        group("This conversation", field("System prompt", this.system), h("label", { class: "check" }, this.everywhere, "Also for new conversations")),
        group(
          "Answers",
          field("Thinking", this.effort, "Of models that think before they answer"),
          h("div", { class: "grid" }, ...settings.PARAMETERS.map(({ name, label, hint }) => field(label, this.inputs.get(name) as HTMLInputElement, hint))),
          h("div", { class: "row" }, button("Reset to the model's defaults", () => this.reset())),
        ),
        group("Page", field("Theme", this.theme), h("div", { class: "row" }, button("API key…", actions.key))),
        group(
          "Conversations",
          h("p", { class: "hint" }, "They are kept in this browser only."),
          h(
            "div",
            { class: "row" },
            button("Export", actions.exportAll),
            button("Import…", () => file.click()),
            button("Delete all", () => actions.removeAll(), "danger"),
            file,
          ),
        ),
        group(
          "Keys",
          h(
            "dl",
            { class: "keys" },
            ...keys("Enter", "Send", "Shift+Enter", "New line", "Esc", "Stop the answer", "↑", "Edit the last message", "Ctrl+K", "New conversation"),
          ),
        ),
        h("p", { class: "hint" }, h("a", { href: "LICENSES.txt", target: "_blank", rel: "noopener" }, "Licences of the libraries of this page")),
      ),
    );
    this.element.addEventListener("click", (event) => {
      if (event.target === this.element) this.element.close(); // beside the sheet
    });
    // A field that still has the focus has not reported its change.
    this.element.addEventListener("close", () => {
      this.keepSystem();
      this.keepSampling();
    });
  }

  open(): void {
    this.system.value = this.actions.system();
    this.everywhere.checked = this.system.value === settings.systemPrompt();
    this.effort.value = settings.effort() ?? "";
    this.theme.value = settings.theme();
    this.fill();
    this.element.showModal();
  }

  private fill(): void {
    const values = settings.sampling();
    for (const [name, input] of this.inputs) input.value = String(values[name] ?? "");
  }

  private reset(): void {
    settings.setSampling({});
    settings.setEffort(null);
    this.effort.value = "";
    this.fill();
  }

  private keepSystem(): void {
    this.actions.setSystem(this.system.value);
    if (this.everywhere.checked) settings.setSystemPrompt(this.system.value);
  }

  /** Keeps the values that are valid; the browser marks the others. */
  private keepSampling(): void {
    const values: { [name: string]: number } = {};
    for (const [name, input] of this.inputs) if (input.value !== "" && input.validity.valid) values[name] = input.valueAsNumber;
    settings.setSampling(values);
  }
}

function group(title: string, ...children: Node[]): HTMLElement {
  return h("section", {}, h("h3", {}, title), ...children);
}

function field(label: string, input: HTMLElement, hint = ""): HTMLElement {
  const name = h("label", { for: input.id }, label);
  return h("div", { class: "field" }, name, input, ...(hint ? [h("small", { id: `${input.id}-hint` }, hint)] : []));
}

function select(id: string, names: { [value: string]: string }): HTMLSelectElement {
  return h("select", { id }, ...Object.entries(names).map(([value, name]) => h("option", { value }, name)));
}

function keys(...pairs: string[]): HTMLElement[] {
  return pairs.map((text, index) => (index % 2 === 0 ? h("dt", {}, h("kbd", {}, text)) : h("dd", {}, text)));
}
