"""Likelihoods: how a model's outputs become log p(y | x), and how its Fisher looks at the outputs.

The Fisher of the weights is `mean_n J_n^T S_n J_n`, with `J_n` the Jacobian of sample n's outputs by the weights and
`S_n` the Fisher at the outputs. Each estimator is a choice of vectors `s_m` with `S_n = sum_m s_m s_m^T` (exact), or
equal to it in expectation (sampled), or of labels that are not the model's own (predicted, empirical). Everything
above this file needs only those vectors; see Martens 2020, "New insights and perspectives on the natural gradient
method", section 9, and Kunstner et al. 2019 on what the empirical one is not.
"""

from __future__ import annotations

from ewc_finetune.errors import UsageError, suggest
from ewc_finetune.likelihood.base import Likelihood
from ewc_finetune.likelihood.bernoulli import Bernoulli
from ewc_finetune.likelihood.categorical import Categorical, PerToken
from ewc_finetune.likelihood.gaussian import Gaussian

_LIKELIHOODS: dict[str, type[Likelihood]] = {kind.name: kind for kind in (Categorical, PerToken, Bernoulli, Gaussian)}


def get_likelihood(name: str) -> Likelihood:
    """Return the likelihood of that name.

    Raises:
        UsageError: if there is none, listing those that there are.
    """
    if name not in _LIKELIHOODS:
        raise UsageError(f"no likelihood is called {name!r}. {suggest(name, _LIKELIHOODS)}")
    return _LIKELIHOODS[name]()
