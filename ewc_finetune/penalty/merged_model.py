"""One model for several anchors: weights that do what the models of all of them do.

The centre of a stack is exact for the penalty, and no good model where a network is sure of itself: what its outputs
barely move the predictions by, K-FAC's factor G has next to nothing for, so that rounding and other anchors' weights
decide there, and the size of G tells how sure a network was of its own samples, not how much it has to lose.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from ewc_finetune.anchor.anchor import Anchor
from ewc_finetune.choices import Lineage
from ewc_finetune.curvature.kronecker_block import Block
from ewc_finetune.penalty.merging import centred, merged_weights
from ewc_finetune.penalty.quadratic import sum_quadratics
from ewc_finetune.progress import Progress

# What is added to a factor, relative to the mean of its eigenvalues: less leaves what no sample says to chance, more
# comes near the mean of the weights. Over four networks 0.03 to 0.3 are within a point of each other.
DAMPING = 0.1


def merged_model(
    anchors: Sequence[Anchor],
    strengths: Sequence[float],
    progress: Progress,
    lineage: Lineage = "all",
    growing: Collection[str] = (),
) -> dict[str, Tensor]:
    """Return the parameters where the anchors together pull least, with their K-FAC blocks of one size and damped.

    Each block's G is brought to the trace of an identity, and a tenth of its mean eigenvalue is added to A and to G, as
    to factors that are to be inverted (Martens and Grosse 2015, section 6). A block then says what a layer's outputs
    are to be on the inputs of its domain, first where they matter, and a strength counts in all layers alike. Diagonals
    are as they are, so that it is the Fisher-weighted mean (Matena and Raffel 2022) of what these hold.

    Args:
        anchors: With one head, oldest first.
        strengths: What each counts, relative to the others.
        progress: Is told where a centre is not quite found.
        lineage: See `sum_quadratics`.
        growing: See `sum_quadratics`.

    Raises:
        AnchorMismatchError: if the anchors do not fit each other.
    """
    blocks = [{layer: _damped(block) for layer, block in anchor.blocks.items()} for anchor in anchors]
    alike = [replace(anchor, blocks=own) for anchor, own in zip(anchors, blocks, strict=True)]
    quadratic = sum_quadratics(alike, strengths, lineage, growing=growing)
    return merged_weights(anchors, centred(quadratic, anchors, progress))


def _damped(block: Block) -> Block:
    trace = block.output.trace
    output = block.output.scaled(block.output.size / trace) if trace > 0 else block.output
    return replace(block, input=block.input.damped(DAMPING), output=output.damped(DAMPING))
