"""The frontier of retention against plasticity, and its knee."""

from __future__ import annotations

from collections.abc import Sequence

# What is learned and what is kept, both so that more is better.
Point = tuple[float, float]


def pareto(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points that no other is better than in one figure and as good in the other.

    They come by what is learned, the least first; of points that are alike the first one stands for all.
    """
    found: list[int] = []
    for n in sorted(range(len(points)), key=lambda n: (-points[n][0], -points[n][1], n)):
        if not found or points[n][1] > points[found[-1]][1]:
            found.append(n)
    return found[::-1]


def knee(points: Sequence[Point]) -> int | None:
    """Return the index of the point at which the frontier bends most (Satopaa et al. 2011, Kneedle).

    That is the one farthest beyond the straight line between the frontier's ends, both figures scaled to 0..1; None
    where the frontier has fewer than three points, or does not reach beyond the line.
    """
    front = pareto(points)
    if len(front) < 3:
        return None
    (left, top), (right, bottom) = points[front[0]], points[front[-1]]
    # On the line the two scaled figures add up to 1.
    beyond = {
        n: (points[n][0] - left) / (right - left) + (points[n][1] - bottom) / (top - bottom) - 1 for n in front[1:-1]
    }
    best = max(beyond, key=lambda n: beyond[n])
    return best if beyond[best] > 0 else None
