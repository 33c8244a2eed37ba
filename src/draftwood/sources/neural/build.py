"""Choose the fastest implementation of a draft head on its device."""

from draftwood.heads import Eagle3Head, EagleHead, Head, HydraHead, MedusaHead
from draftwood.sources.neural.head import AheadModel, EagleModel, HeadModel
from draftwood.sources.neural.head_fused import FusedEagleModel, why_not_fused
from draftwood.targets.native import cuda


def make_head_model(
    head: Head, num_layers: int, num_slots: int, *, quantize: bool = False, has_shortlist: bool = False
) -> HeadModel:
    """Wrap a head, bound to its target of ``num_layers`` layers, with a cache of ``num_slots`` positions.

    ``quantize``: an EAGLE-3 head on a CPU may run in 4 bits, large matrices of an EAGLE head on a GPU in 8;
    ``has_shortlist``: a head on a CPU may leave out rare tokens.
    """
    taps = head.config.taps_for(num_layers)
    if isinstance(head, (MedusaHead, HydraHead)):
        return AheadModel(head, taps, num_slots)
    if isinstance(head, (EagleHead, Eagle3Head)) and not cuda.why_not_on(head.parts.embed.device):
        from draftwood.sources.neural.head_graphs import GraphedEagleModel, why_not_graphed  # needs Triton

        if not why_not_graphed(head):
            return GraphedEagleModel(head, taps, num_slots, quantize=quantize)
    if quantize and isinstance(head, Eagle3Head) and not why_not_fused(head):
        return FusedEagleModel(head, taps, num_slots, has_shortlist=has_shortlist)
    return EagleModel(head, taps, num_slots)
