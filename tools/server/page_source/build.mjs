/* Builds the chat page: src/ -> ../page/ (scripts, styles, the licences of bundled libraries). Takes no arguments.
 *
 * Each bundle begins with the SHA-256 of the sources, which tests/test_serve_page.py compares with them. */

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import * as esbuild from "esbuild";

const LIMIT = 400_000; // bytes of the whole page
const here = dirname(fileURLToPath(import.meta.url));
const source = join(here, "src");
const out = join(here, "..", "page");

/** SHA-256 over the names and contents of everything that the page is built from. */
function digest() {
  const hash = createHash("sha256");
  for (const name of ["build.mjs", "package-lock.json", ...readdirSync(source).sort().map((file) => `src/${file}`)]) {
    hash.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
  }
  return hash.digest("hex");
}

/** The licence texts of the packages whose files are in the bundle. */
function licences(metafile) {
  const names = new Set();
  for (const path of Object.keys(metafile.inputs)) {
    const found = /node_modules\/((?:@[^/]+\/)?[^/]+)/.exec(path);
    if (found) names.add(found[1]);
  }
  const texts = [...names].sort().map((name) => {
    const folder = join(here, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
    if (!file) throw new Error(`${name} has no licence file`);
    return `${name} ${version} (${license})\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`;
  });
  return `Libraries that app.js contains\n\n${texts.join(`\n${"-".repeat(80)}\n\n`)}`;
}

rmSync(out, { recursive: true, force: true });
mkdirSync(out, { recursive: true });
const built = await esbuild.build({
  entryPoints: ["app.ts", "theme.ts", "app.css"].map((name) => join(source, name)),
  outdir: out,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome123", "firefox121", "safari17.5"],
  legalComments: "none",
  charset: "utf8",
  banner: Object.fromEntries(["js", "css"].map((kind) => [kind, `/* sources: ${digest()} */`])),
  metafile: true,
  absWorkingDir: here,
});
for (const name of ["index.html", "icon.svg"]) writeFileSync(join(out, name), readFileSync(join(source, name)));
writeFileSync(join(out, "LICENSES.txt"), licences(built.metafile));

const sizes = readdirSync(out).map((name) => [name, readFileSync(join(out, name)).length]);
const total = sizes.reduce((sum, [, size]) => sum + size, 0);
for (const [name, size] of [...sizes, ["total", total]]) console.log(`${name.padEnd(14)} ${String(size).padStart(8)}`);
if (total > LIMIT) throw new Error(`the page has ${total} bytes, more than ${LIMIT}`);
