"""`shapes`: procedural captioned scenes of 128 x 128 pixels with exact ground truth.

A scene is one to three flat shapes on a textured background. Its caption states everything that a reader of the
picture could check: shapes, colours, sizes, the relation or the count, background colour and texture. All geometry
lies on a grid of 8 pixels, one token of the embedded tokenizer, so that a small model can learn it. As in GenEval
(Ghosh et al. 2023), generated pictures are scored by reading their objects back; here
`visual_spec.data.shapes_parser` reads them, without a network.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from visual_spec.data.splits import is_held_out, sample_part

IMAGE_SIZE = 128
CELL = 8  # pixels of one token; all centres are multiples of it

OBJECT_COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (215, 45, 45),
    "orange": (245, 140, 30),
    "yellow": (250, 215, 50),
    "green": (50, 155, 70),
    "blue": (40, 90, 205),
    "purple": (135, 60, 165),
    "white": (250, 250, 250),
    "black": (35, 35, 40),
}
BACKGROUND_COLOURS: dict[str, tuple[int, int, int]] = {
    "grey": (160, 160, 165),
    "sand": (225, 205, 165),
    "mint": (175, 222, 195),
    "sky": (165, 205, 238),
    "pink": (242, 190, 202),
    "lavender": (202, 190, 232),
}
SHAPES = ("circle", "square", "triangle", "diamond", "star", "cross")
SIZES: dict[str, int] = {"small": 14, "large": 26}  # radius in pixels
TEXTURES = ("plain", "gradient", "striped", "dotted", "checked")
RELATIONS = ("left of", "right of", "above", "below", "inside", "overlapping")
COUNTS = {"two": 2, "three": 3}
TOUCHING = 0.15  # share of scenes with one object inside or overlapping another

_PLURAL = {name: name + ("es" if name == "cross" else "s") for name in SHAPES}
_OUTLINE_PIXELS = 2.0
_OUTLINE_SHADE = 0.55
_TEXTURE_SHADE = 0.88


@dataclass(frozen=True)
class ShapeObject:
    """One shape. `x`, `y`: centre in pixels (right, down); the radius is `SIZES[size]`."""

    shape: str
    colour: str
    size: str
    x: int
    y: int


@dataclass(frozen=True)
class Scene:
    """A picture's ground truth. `objects` are painted in order; `relation` binds the first to the second object."""

    objects: tuple[ShapeObject, ...]
    background: str
    texture: str
    relation: str | None = None

    @property
    def is_group(self) -> bool:
        """Return whether the objects are copies of one kind, captioned by their count."""
        return self.relation is None and len(self.objects) > 1


def caption(scene: Scene) -> str:
    """Return the English caption of a scene, the only form on which the embedded text encoder is trained."""
    first = scene.objects[0]
    if scene.is_group:
        number = {value: word for word, value in COUNTS.items()}[len(scene.objects)]
        subject = f"{number} {first.size} {first.colour} {_PLURAL[first.shape]}"
    else:
        subject = _phrase(first)
        if scene.relation is not None:
            subject += f" {scene.relation} {_phrase(scene.objects[1])}"
    return f"{subject} on a {scene.texture} {scene.background} background"


def _phrase(item: ShapeObject) -> str:
    return f"a {item.size} {item.colour} {item.shape}"


def vocabulary() -> list[str]:
    """Return every word that a caption can hold."""
    relations = [word for relation in RELATIONS for word in relation.split()]
    words = [
        "a",
        "on",
        "background",
        *COUNTS,
        *OBJECT_COLOURS,
        *BACKGROUND_COLOURS,
        *SHAPES,
        *SIZES,
        *TEXTURES,
    ]
    return list(dict.fromkeys([*words, *relations, *_PLURAL.values()]))


def sample_scene(rng: np.random.Generator, touching: float = TOUCHING) -> Scene:
    """Draw a scene.

    Args:
        touching: share of scenes with one object inside or overlapping another, 0 to 1. Of the others, 7 in 17 show
            one object, 7 two side by side, 3 a count.
    """
    background = str(rng.choice(list(BACKGROUND_COLOURS)))
    texture = str(rng.choice(TEXTURES))
    apart = 1 - touching
    kind = rng.choice(
        ["single", "direction", "group", "inside", "overlapping"],
        p=[apart * 7 / 17, apart * 7 / 17, apart * 3 / 17, touching / 2, touching / 2],
    )
    shapes = [str(s) for s in rng.choice(SHAPES, 2)]
    colours = [str(c) for c in rng.choice(list(OBJECT_COLOURS), 2, replace=False)]
    sizes = [str(s) for s in rng.choice(list(SIZES), 2)]
    centre = IMAGE_SIZE // 2

    def jitter(reach: int) -> int:
        return int(rng.integers(-reach, reach + 1)) * CELL

    if kind == "single":
        item = ShapeObject(shapes[0], colours[0], sizes[0], centre + jitter(2), centre + jitter(2))
        return Scene((item,), background, texture)
    if kind == "group":
        number = int(rng.integers(2, 4))
        offset = jitter(1)
        step = 32 if number == 3 else 48
        first = centre - step * (number - 1) // 2 // CELL * CELL
        along_row = bool(rng.integers(2))
        items = []
        for index in range(number):
            along, across = first + index * step, centre + offset
            x, y = (along, across) if along_row else (across, along)
            items.append(ShapeObject(shapes[0], colours[0], "small", x, y))
        return Scene(tuple(items), background, texture)
    if kind == "inside":
        # The outer shape is a wide one, so that its colour surrounds the inner one on all sides.
        outer = str(rng.choice(["circle", "square"]))
        x, y = centre + jitter(2), centre + jitter(2)
        items = (
            ShapeObject(shapes[0], colours[0], "small", x, y),
            ShapeObject(outer, colours[1], "large", x, y),
        )
        return Scene(items, background, texture, "inside")
    if kind == "overlapping":
        x, y = centre + jitter(1), centre + jitter(1)
        dx = 16 if rng.integers(2) else -16
        items = (
            ShapeObject(shapes[0], colours[0], "large", x + dx, y + 8),
            ShapeObject(shapes[1], colours[1], "large", x - dx, y - 8),
        )
        return Scene(items, background, texture, "overlapping")
    relation = str(rng.choice(RELATIONS[:4]))
    sign = -1 if relation in ("left of", "above") else 1
    along, across = centre + sign * 32, centre + jitter(1)
    other_along, other_across = centre - sign * 32, across
    first_xy, second_xy = ((along, across), (other_along, other_across))
    if relation in ("above", "below"):
        first_xy, second_xy = (across, along), (other_across, other_along)
    items = (
        ShapeObject(shapes[0], colours[0], sizes[0], *first_xy),
        ShapeObject(shapes[1], colours[1], sizes[1], *second_xy),
    )
    return Scene(items, background, texture, relation)


def sample_scenes(
    count: int, seed: int | tuple[int, int], *, held_out: bool = False, touching: float = TOUCHING
) -> list[Scene]:
    """Draw scenes of `sample_scene` whose captions are all inside or all outside the held-out tenth."""
    return sample_part(
        lambda rng: sample_scene(rng, touching),
        lambda scene: is_held_out(caption(scene)),
        count,
        seed,
        held_out,
    )


def sample_dataset(
    count: int, seed: int, *, held_out: bool = False, size: int = IMAGE_SIZE, touching: float = TOUCHING
) -> tuple[list[Scene], np.ndarray]:
    """Scenes of `sample_scenes`, and their pictures `[count, size, size, 3]` uint8."""
    scenes = sample_scenes(count, seed, held_out=held_out, touching=touching)
    return scenes, np.stack([render(scene, size) for scene in scenes]) if scenes else np.empty(
        (0, size, size, 3), np.uint8
    )


def held_out_prompts(count: int, seed: int = 0) -> list[str]:
    """Return captions of held-out scenes."""
    return [caption(scene) for scene in sample_scenes(count, seed, held_out=True)]


def training_prompts(count: int, seed: int | tuple[int, int]) -> list[str]:
    """Return captions of scenes outside the held-out tenth."""
    return [caption(scene) for scene in sample_scenes(count, seed)]


def signed_distance(shape: str, dx: np.ndarray, dy: np.ndarray, radius: float) -> np.ndarray:
    """Return the signed distance in pixels to the outline of a shape at the origin, negative inside.

    Exact for the circle and for points near straight edges, which are the only ones used. A shape that is not one of
    `SHAPES` is refused, here and so by all that paints.
    """
    ax, ay = np.abs(dx), np.abs(dy)
    if shape == "circle":
        return np.hypot(dx, dy) - radius
    if shape == "square":
        return np.maximum(ax, ay) - 0.88 * radius
    if shape == "diamond":
        return (ax * 1.25 + ay - 1.1 * radius) / np.hypot(1.25, 1.0)
    if shape == "triangle":
        # Upward, base at +0.8 r, apex at -1.0 r.
        slope = 1.0 / 1.8
        side = (ax - slope * (dy + 1.0 * radius)) / np.hypot(1.0, slope)
        return np.maximum(side, dy - 0.8 * radius)
    if shape == "cross":
        arm, reach = 0.34 * radius, 0.95 * radius
        return np.minimum(np.maximum(ax - arm, ay - reach), np.maximum(ax - reach, ay - arm))
    if shape == "star":
        # Five points: distance to the edge between an outer and an inner corner, folded by symmetry.
        angle = np.arctan2(dx, -dy)
        sector = 2 * np.pi / 5
        angle = np.abs((angle + sector / 2) % sector - sector / 2)
        length = np.hypot(dx, dy)
        px, py = length * np.cos(angle), length * np.sin(angle)
        outer, inner = 1.08 * radius, 0.48 * radius
        ix, iy = inner * np.cos(sector / 2), inner * np.sin(sector / 2)
        edge = np.hypot(outer - ix, iy)
        return ((px - outer) * iy + py * (outer - ix)) / edge
    raise ValueError(f"unknown shape {shape!r}; allowed: {', '.join(SHAPES)}")


def render(scene: Scene, size: int = IMAGE_SIZE) -> np.ndarray:
    """Paint a scene: `[size, size, 3]` uint8, anti-aliased, each shape with a darker outline of 2 pixels."""
    scale = size / IMAGE_SIZE
    y, x = np.mgrid[0:size, 0:size].astype(np.float32)
    x, y = (x + 0.5) / scale, (y + 0.5) / scale  # pixel centres in the units of the 128-pixel canvas
    canvas = _paint_background(scene.background, scene.texture, x, y)
    for item in reversed(scene.objects):  # the first object is in front
        radius = SIZES[item.size]
        canvas = paint_shape(canvas, x - item.x, y - item.y, item.shape, item.colour, radius, scale)
    return np.clip(np.rint(canvas), 0, 255).astype(np.uint8)


def covered(scene: Scene) -> np.ndarray:
    """Return which pixels lie inside a shape, bool `[128, 128]`."""
    return _shown(scene) > 0


def outline(scene: Scene) -> np.ndarray:
    """Return the outline of a scene's shapes, bool `[128, 128]`, one pixel wide: a control picture for ControlAR.

    A pixel is on it if its right or lower neighbour shows another object, or the background.
    """
    shown = _shown(scene)
    edge = np.pad(shown[:, 1:] != shown[:, :-1], ((0, 0), (0, 1)))
    return edge | np.pad(shown[1:] != shown[:-1], ((0, 1), (0, 0)))


def _shown(scene: Scene) -> np.ndarray:
    """The object that each pixel shows, from 1 on, or 0: int `[128, 128]`."""
    y, x = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE] + 0.5
    shown = np.zeros((IMAGE_SIZE, IMAGE_SIZE), int)
    for number, item in reversed(list(enumerate(scene.objects, 1))):  # the first object is in front
        shown[signed_distance(item.shape, x - item.x, y - item.y, SIZES[item.size]) < 0] = number
    return shown


def paint_shape(
    canvas: np.ndarray,
    dx: np.ndarray,
    dy: np.ndarray,
    shape: str,
    colour: str,
    radius: float,
    scale: float = 1.0,
) -> np.ndarray:
    """Return a canvas float `[H, W, 3]` with one shape painted over it.

    `dx`, `dy`, `[H, W]`: distance of each pixel to the shape's centre, right and down, in units of `radius`; a unit
    has `scale` pixels.
    """
    distance = signed_distance(shape, dx, dy, radius) * scale
    paint = np.array(OBJECT_COLOURS[colour], np.float32)
    # A light from above left keeps flat colours from looking like clip art.
    light = 1.0 - 0.10 * (dx + dy) / (2 * radius)
    fill = np.clip(paint * light[..., None], 0, 255)
    outline = paint * _OUTLINE_SHADE
    body = np.clip(0.5 - (distance + _OUTLINE_PIXELS * scale), 0, 1)[..., None]
    cover = np.clip(0.5 - distance, 0, 1)[..., None]
    return canvas * (1 - cover) + (fill * body + outline * (1 - body)) * cover


def _paint_background(background: str, texture: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    colour = np.array(BACKGROUND_COLOURS[background], np.float32)
    if texture == "plain":
        shade = np.ones_like(x)
    elif texture == "gradient":
        shade = 1.06 - 0.30 * y / IMAGE_SIZE
    elif texture == "striped":
        shade = np.where((x + y) % 16 < 8, _TEXTURE_SHADE, 1.0)
    elif texture == "dotted":
        distance = np.hypot(x % 16 - 8, y % 16 - 8) - 3.5
        shade = 1.0 - (1.0 - 0.82) * np.clip(0.5 - distance, 0, 1)
    elif texture == "checked":
        shade = np.where((x // 16 + y // 16) % 2 < 1, _TEXTURE_SHADE, 1.0)
    else:
        raise ValueError(f"unknown texture {texture!r}; allowed: {', '.join(TEXTURES)}")
    return colour * shade[..., None]
