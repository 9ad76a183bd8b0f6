/* Makes elements. Text becomes text nodes, never markup. */

type Value = string | boolean | ((event: never) => void);

/** An element with attributes (true: empty, false: none), listeners (`onclick: f`) and children. */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  attributes: { [name: string]: Value | undefined } = {},
  ...children: (Node | string)[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name.slice(2), value as EventListener);
    else if (typeof value === "boolean") element.toggleAttribute(name, value);
    else if (value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Paths of icons with lines, in a square of 24. */
const ICONS = {
  menu: "M4 7h16M4 12h16M4 17h16",
  new: "M12 5v14M5 12h14",
  search: "M11 18a7 7 0 1 0 0-14 7 7 0 0 0 0 14zM16 16l4.5 4.5",
  settings: "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.5v5M8 14.5v5",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7.5 7.5h9v9h-9z",
  copy: "M9 9h10v11H9zM15 9V4.5H5V15h4",
  check: "M5 12.5l4.5 4.5L19 7.5",
  close: "M6 6l12 12M18 6L6 18",
  edit: "M5 19l1-4L16.5 4.5l3 3L9 18zM14.5 6.5l3 3",
  again: "M19.5 12a7.5 7.5 0 1 1-2.3-5.4M19.5 4v4h-4",
  remove: "M5 7h14M9.5 7V4.5h5V7M7 7l1 12.5h8L17 7",
  more: "M4 5.5h16M4 11h16M4 16.5h4M11.5 16.5h8M16 13l3.5 3.5L16 20",
  attach: "M19.5 11.5l-7.6 7.6a4.6 4.6 0 0 1-6.5-6.5l8-8a3.1 3.1 0 0 1 4.4 4.4l-8 8a1.5 1.5 0 0 1-2.2-2.2l7-7",
  file: "M6 3.5h8l4 4v13H6zM14 3.5v4h4",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  // a moon within the rays of a sun
  system: "M16.6 13.4a4.8 4.8 0 1 1-6-6 3.9 3.9 0 0 0 6 6zM12 2v2M12 20v2M2 12h2M20 12h2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  light: "M12 16a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM12 2.5V5M12 19v2.5M2.5 12H5M19 12h2.5M5.3 5.3L7 7M17 17l1.7 1.7M5.3 18.7L7 17M17 7l1.7-1.7",
  dark: "M20 14A8.5 8.5 0 0 1 10 4a8.5 8.5 0 1 0 10 10z",
} as const;

export type Icon = keyof typeof ICONS;

/** A decorative icon in the colour of the text. */
export function icon(name: Icon): SVGSVGElement {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(space, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows only an icon; `label` is its name and tooltip. */
export function iconButton(name: Icon, label: string, onclick: (event: MouseEvent) => void, attributes: { [name: string]: string } = {}): HTMLButtonElement {
  return h("button", { type: "button", class: "icon", "aria-label": label, title: label, onclick, ...attributes }, icon(name));
}
