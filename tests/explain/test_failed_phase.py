import pytest

from budgetfit.explain.failed_phase import FailedPhase, failed_phase

LIB = "/opt/conda/lib/python3.10/site-packages"


def trace(*frames: tuple[str, str]) -> str:
    """A traceback as Python prints it."""
    lines = [f'  File "{path}", line 7, in {name}\n    code()' for path, name in frames]
    return "\n".join(("Traceback (most recent call last):", *lines, ""))


TRAIN = ("/home/me/train.py", "train")
CALL = (f"{LIB}/torch/nn/modules/module.py", "_call_impl")
LLAMA = (f"{LIB}/transformers/models/llama/modeling_llama.py", "forward")
LINEAR = (f"{LIB}/torch/nn/modules/linear.py", "forward")
BACKWARD = (f"{LIB}/torch/_tensor.py", "backward")
ENGINE = (f"{LIB}/torch/autograd/graph.py", "_engine_run_backward")
CHECKPOINT = (f"{LIB}/torch/utils/checkpoint.py", "recompute_fn")
ADAMW = (f"{LIB}/torch/optim/adamw.py", "step")
EVALUATE = (f"{LIB}/transformers/trainer.py", "evaluation_loop")
MOVE = (f"{LIB}/torch/nn/modules/module.py", "convert")
PRETRAINED = (f"{LIB}/transformers/modeling_utils.py", "from_pretrained")


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        ((TRAIN, CALL, LLAMA, CALL, LINEAR), "forward"),
        ((TRAIN, BACKWARD, ENGINE), "backward"),
        ((TRAIN, ADAMW), "optimizer"),
        (
            (TRAIN, (f"{LIB}/torch/nn/utils/clip_grad.py", "clip_grad_norm_")),
            "optimizer",
        ),
        ((TRAIN, (f"{LIB}/bitsandbytes/optim/optimizer.py", "step")), "optimizer"),
        ((TRAIN, EVALUATE, CALL, LLAMA), "evaluation"),
        ((TRAIN, (f"{LIB}/torch/nn/modules/module.py", "to"), MOVE), "to_device"),
        ((TRAIN, PRETRAINED, CALL, MOVE), "loading"),
        ((TRAIN, (f"{LIB}/torch/serialization.py", "load")), "loading"),
        ((TRAIN,), "unknown"),
        ((), "unknown"),
        # Lightning hands the optimizer a closure that computes loss and gradients.
        (
            (TRAIN, ADAMW, ("/home/me/model.py", "training_step"), CALL, LINEAR),
            "forward",
        ),
        ((TRAIN, ADAMW, BACKWARD, ENGINE), "backward"),
    ],
)
def test_the_innermost_frames_decide(
    frames: tuple[tuple[str, str], ...], phase: str
) -> None:
    assert failed_phase(trace(*frames)).phase == phase


def test_a_forward_inside_a_backward_is_a_block_that_is_recomputed() -> None:
    found = failed_phase(trace(TRAIN, BACKWARD, ENGINE, CHECKPOINT, CALL, LLAMA))
    assert (found.phase, found.recomputing) == ("backward", True)
    assert not failed_phase(trace(TRAIN, BACKWARD, ENGINE)).recomputing


def test_the_place_is_the_users_own_line_and_the_family_is_named() -> None:
    found = failed_phase(trace(TRAIN, CALL, LLAMA))
    assert found.place == "/home/me/train.py in train"
    assert found.family == "llama"


def test_the_optimizers_first_step_and_its_temporaries_are_seen() -> None:
    made = failed_phase(trace(ADAMW, (ADAMW[0], "_init_group")))
    assert made.state_is_new
    foreach = failed_phase(trace(ADAMW, (ADAMW[0], "_multi_tensor_adamw")))
    assert foreach.foreach
    assert not foreach.state_is_new


def test_loss_and_attention_are_seen() -> None:
    loss = trace(TRAIN, CALL, LLAMA, (f"{LIB}/torch/nn/functional.py", "cross_entropy"))
    assert failed_phase(loss).in_loss
    eager = (LLAMA[0], "eager_attention_forward")
    assert failed_phase(trace(TRAIN, CALL, eager, CALL)).in_attention


def test_rich_and_ipython_tracebacks_are_read() -> None:
    rich = (
        " C:\\kohya\\lib\\site-packages\\torch\\cuda\\amp\\grad_scaler.py:290 in "
        "_maybe_opt_step  \n   290   retval = optimizer.step(*args)\n"
        " C:\\kohya_ss\\venv\\lib\\site-packages\\torch\\optim\\adamw.py:171 in step\n"
    )
    found = failed_phase(rich)
    assert (found.phase, found.on_windows) == ("optimizer", True)
    ipython = (
        "OutOfMemoryError   Traceback (most recent call last)\n"
        "Cell In[3], line 1\n----> 1 trainer.evaluate()\n"
        "File /usr/local/lib/python3.8/dist-packages/transformers/trainer.py:2113, in "
        "Trainer.evaluate(self, eval_dataset)\n   2113 output = eval_loop(\n"
    )
    assert failed_phase(ipython).phase == "evaluation"


def test_a_batch_that_is_moved_by_the_users_own_line_is_seen() -> None:
    text = trace(TRAIN).replace("code()", 'x = batch.to("cuda")')
    assert failed_phase(text).phase == "to_device"


def test_of_several_tracebacks_the_last_one_counts() -> None:
    both = trace(TRAIN, ADAMW) + "ValueError\n" + trace(TRAIN, BACKWARD, ENGINE)
    assert failed_phase(both).phase == "backward"
    assert failed_phase("") == FailedPhase(phase="unknown")
