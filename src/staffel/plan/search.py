"""The search: each phase alone, both together, and colocated instances beside them.

DistServe (OSDI 2024), algorithms 1 and 2, with three changes. Candidates whose latency model
already says that they can't be best are not simulated. Placements are ranked by simulations of
both phases together, in the proportion in which they are recommended. Colocated instances compete.
"""

from __future__ import annotations

from staffel.plan.alone import phase_alone
from staffel.plan.colocated import colocated
from staffel.plan.question import Found, Log, Question
from staffel.plan.together import together
from staffel.plan.trials import Simulator


def search(question: Question, simulator: Simulator, log: Log | None = None) -> Found:
    """Everything that could be recommended, simulated where no bound rules it out."""
    log = log or Log()
    prefill = phase_alone(question, "prefill", simulator, log)
    decode = phase_alone(question, "decode", simulator, log)
    disaggregated = together(question, prefill, decode, simulator, log)
    alone = colocated(question, simulator, log)
    return Found(
        prefill=prefill,
        decode=decode,
        disaggregated=disaggregated,
        colocated=alone,
        simulated=log.simulated,
        skipped=log.skipped,
    )
