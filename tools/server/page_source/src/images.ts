/* Images that are attached to a message: read, made as small as models need them, and shown. */

import { h, iconButton } from "./dom";
import type { ImageFile } from "./types";

/** Of a file. */
const LARGEST_BYTES = 32 << 20;
/** More pixels than models look at, and more bytes than such a picture takes: it is made smaller. Each later request of a
 * conversation sends its images again. */
const MOST_PIXELS = 1 << 22;
const MOST_BYTES = 2 << 20;
/** Formats that servers decode. */
const FORMATS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const QUALITY = 0.92;

/** Whether a file is a picture. Vector graphics are texts. */
export function isPicture(file: File): boolean {
  return file.type.startsWith("image/") && !file.type.startsWith("image/svg");
}

/** A valid data URL of an image, which may come from a file that was imported. */
export function isImageUrl(url: string): boolean {
  return /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/.test(url);
}

/** Reads a picture. Throws an Error with one line for people where it cannot be sent. */
export async function readImage(file: File, name: string): Promise<ImageFile> {
  if (file.size > LARGEST_BYTES) throw new Error(`“${name}” has more than ${LARGEST_BYTES >> 20} MiB: attach a smaller picture.`);
  const picture = await createImageBitmap(file).catch(() => {
    throw new Error(`“${name}” cannot be read: attach a PNG, JPEG, WebP or GIF file.`);
  });
  const { width, height } = picture;
  try {
    const factor = Math.min(1, Math.sqrt(MOST_PIXELS / (width * height)));
    if (factor === 1 && file.size <= MOST_BYTES && FORMATS.includes(file.type)) return { name, url: await dataUrl(file), width, height };
    const canvas = h("canvas", { width: String(Math.max(1, Math.round(width * factor))), height: String(Math.max(1, Math.round(height * factor))) });
    const context = canvas.getContext("2d");
    if (!context) throw new Error(`“${name}” is too large for this browser: attach a smaller picture.`);
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, 0, 0, canvas.width, canvas.height);
    // A browser that does not write WebP, which keeps transparent parts, writes PNG.
    const type = file.type === "image/jpeg" ? file.type : "image/webp";
    return { name, url: canvas.toDataURL(type, QUALITY), width: canvas.width, height: canvas.height };
  } finally {
    picture.close();
  }
}

/** An image of a message that was sent; with `remove`, of one that is being written. */
export function thumbnail(image: ImageFile, remove?: () => void): HTMLElement {
  const picture = h("img", { src: image.url, alt: image.name, title: `${image.name}, ${image.width} × ${image.height}` });
  if (!remove) return h("div", { class: "picture" }, picture);
  return h("li", { class: "picture" }, picture, iconButton("close", `Remove ${image.name}`, remove));
}

function dataUrl(file: File): Promise<string> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result as string);
    reader.onerror = () => reject(new Error(`“${file.name}” cannot be read.`));
    reader.readAsDataURL(file);
  });
}
