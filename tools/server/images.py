"""The images of requests, in the forms of OpenAI's, Anthropic's and ollama's APIs.

In: parts of a content, or base64. Out: `ImageSource`. Its `load` returns the file's bytes; it takes time, so it is
called in the thread that makes the prompt. Raises ApiError 400 for a form that this server does not support, and
UserError for bad data.
"""

from dataclasses import dataclass

from mlc_amd.runtime.errors import UserError, shorten
from mlc_amd.runtime.images.pictures import of_base64, of_data_url
from mlc_amd.tools.server.errors import invalid
from mlc_amd.tools.server.fields import Fields

# The types of parts that are images.
IMAGE_PARTS = ("image_url", "input_image", "image")


@dataclass(frozen=True)
class ImageSource:
    """text: a URL, or base64. path: the field, for errors."""

    text: str
    path: str

    def load(self, urls: bool) -> bytes:
        """The bytes of the file. urls: whether images may be downloaded from the web."""
        scheme, colon, _ = self.text[:16].partition(":")
        if not colon:
            return of_base64(self.text, self.path)
        if scheme.lower() == "data":
            return of_data_url(self.text, self.path)
        if scheme.lower() not in ("http", "https"):
            raise UserError(f"{self.path} is {shorten(self.text)}: it must be a data URL")
        if not urls:
            advice = "send a data URL, or start the server with --allow-image-urls"
            raise UserError(f"{self.path} is {shorten(self.text)}: this server fetches no images: {advice}")
        from mlc_amd.tools.server.image_urls import fetch  # it needs httpcore

        return fetch(self.text, self.path)


def image_of(part: Fields) -> ImageSource:
    """The image in a part with a type of IMAGE_PARTS: {"image_url": a URL or {"url"}}, or Anthropic's {"source":
    {"type": "base64", "data"} or {"type": "url", "url"}}."""
    if part.text("type") != "image":
        if isinstance(part.raw("image_url"), str):
            return _source(part, "image_url")
        part.required("image_url")
        return _source(part.object("image_url") or part, "url")
    part.required("source")
    source = part.object("source") or part
    return _source(source, {"base64": "data", "url": "url"}[source.choice("type", ("base64", "url"), "base64")])


def images_in(fields: Fields) -> list[ImageSource]:
    """ollama's images: the field `images`, a list of base64 texts."""
    return [ImageSource(text, f"{fields.path('images')}[{place}]") for place, text in enumerate(fields.texts("images"))]


def _source(fields: Fields, name: str) -> ImageSource:
    if not fields.text(name):
        raise invalid(f"{fields.path(name)} is missing", fields.path(name))
    return ImageSource(fields.text(name), fields.path(name))
