/* Copies text, with a button that says that it did. */

import { h, icon } from "./dom";

/** A button that copies what `text` returns. `label` is its accessible name, `caption` what it shows beside its icon. */
export function copyButton(label: string, text: () => string, caption = ""): HTMLButtonElement {
  const content = () => [icon("copy"), ...(caption ? [h("span", {}, caption)] : [])];
  const button = h("button", { type: "button", class: caption ? "quiet" : "icon", "aria-label": label, title: label }, ...content());
  button.addEventListener("click", async () => {
    const copied = await copy(text());
    button.replaceChildren(icon(copied ? "check" : "close"), ...(caption ? [h("span", {}, copied ? "Copied" : "Failed")] : []));
    button.setAttribute("aria-label", copied ? "Copied" : "Could not copy");
    setTimeout(() => {
      button.replaceChildren(...content());
      button.setAttribute("aria-label", label);
    }, 1500);
  });
  return button;
}

async function copy(text: string): Promise<boolean> {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text); // no such API without HTTPS on another host, or not allowed
  }
}

/** The older way, which works without HTTPS. */
function copySelected(text: string): boolean {
  const focused = document.activeElement;
  const area = h("textarea", { class: "hidden", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  if (focused instanceof HTMLElement) focused.focus();
  return copied;
}
