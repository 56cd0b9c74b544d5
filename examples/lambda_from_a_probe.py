"""How strong must the pull be when nobody has the old data any more? A probe in the anchor answers.

The anchor keeps 200 inputs of the old domain and the model's answers to them. Lambda is then the weakest that keeps 90%
of these answers; the accuracy on the old domain is only shown here, and has no say.

    python examples/lambda_from_a_probe.py
"""

import ewc_finetune as ewc

OLD, NEW = "digits", "digits?rotate=90"
TRAINING = {"epochs": 20, "lr": 1e-3, "batch_size": 50}


def main() -> None:
    model = ewc.finetune("mlp?hidden=64", OLD, eval_on=[], **(TRAINING | {"epochs": 40})).model
    anchor = ewc.consolidate(model, OLD, probe=200)
    done = ewc.finetune(model, NEW, anchors=anchor, lambdas="auto", retain=0.9, eval_on=[OLD, NEW], **TRAINING)
    print(f"{len(done.search.trials)} runs for {done.search.aim}: lambda {done.search.strength:.3g}")
    (probe,) = done.retention
    print(f"{probe.unchanged:.1%} of the answers to {probe.samples} inputs are as they were")
    for score in done.after:
        print(f"{score.domain}: {score.accuracy:.1%}")


if __name__ == "__main__":
    main()
