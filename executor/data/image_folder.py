"""Images in folders, one folder for each class, as torchvision's `ImageFolder` takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from executor.data.rows import Given, Positions, Rows
from plans.errors import TwofoldError
from plans.model.graph import Graph

__all__ = ["rows_of_images"]

ENDINGS = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"})
# Mean and deviation of ImageNet's pixels, with which torchvision's weights were trained; of grey images their averages.
COLOUR = (np.array([0.485, 0.456, 0.406], np.float32), np.array([0.229, 0.224, 0.225], np.float32))
GREY = (np.array([0.449], np.float32), np.array([0.226], np.float32))


def rows_of_images(folder: Path, graph: Graph) -> Rows:
    """The images of a folder by class and name; a label is the place of its class among the sorted names of folders.

    An image is scaled until it covers the height and width of the model's input, cut at its middle, and normalised with
    the mean and deviation of ImageNet. Files are read when their sample is needed.

    Args:
        folder: with a folder of images for each class.
        graph: of images [batch, 1 or 3, height, width] and labels [batch].

    Raises:
        TwofoldError: a model of other inputs, a class without images, more classes than the model has, no Pillow; while
            samples are read, a file that is not an image.
    """
    from executor.data.batches import input_limits

    name = str(folder)
    shapes = [tensor.shape for tensor in graph.inputs]
    if len(shapes) != 2 or len(shapes[0]) != 4 or shapes[0][1] not in (1, 3) or len(shapes[1]) != 1:
        raise TwofoldError(
            f"data {name!r} is for models of images [batch, 1 or 3, height, width] and labels [batch]; this takes "
            f"{', '.join(map(str, shapes))}"
        )
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise TwofoldError(f"data {name!r}: reading images needs Pillow; pip install pillow") from None
    classes = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    limit = input_limits(graph).get(graph.inputs[1].name, len(classes))
    if len(classes) > limit:
        raise TwofoldError(f"data {name!r} has {len(classes)} folders of classes, but the model has {limit} classes")
    files: list[Path] = []
    labels: list[int] = []
    for label, of_class in enumerate(classes):
        found = sorted(path for path in of_class.rglob("*") if path.suffix.lower() in ENDINGS)
        if not found:
            raise TwofoldError(f"{of_class}: has no images ({', '.join(sorted(ENDINGS))}); remove it, or fill it")
        files += found
        labels += [label] * len(found)
    numbers = np.array(labels, np.int64)
    _, channels, height, width = shapes[0]

    def take(positions: Positions) -> Given:
        images = [_image(files[position], channels, height, width) for position in positions]
        return np.stack(images), numbers[positions]

    return Rows(len(files), take)


def _image(path: Path, channels: int, height: int, width: int) -> npt.NDArray[Any]:
    """float32 [channels, height, width]."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            fitted = ImageOps.fit(
                file.convert("RGB" if channels == 3 else "L"), (width, height), Image.Resampling.BILINEAR
            )
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise TwofoldError(f"{path}: not a readable image ({str(error)[:200]})") from None
    mean, deviation = COLOUR if channels == 3 else GREY
    pixels = np.asarray(fitted, np.float32).reshape(height, width, channels) / np.float32(255)
    return np.ascontiguousarray(((pixels - mean) / deviation).transpose(2, 0, 1))
