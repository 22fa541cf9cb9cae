"""The command lines of the documentation that no test runs as written, each with the reason."""

from __future__ import annotations

from doc_pages import COMMANDS, Command

NOT_RUN = {
    "make setup": "installs the project; the tests run in an environment that it has set up",
    "make gpu": "needs a GPU; `processes/test_gpu_page.py` tries its parts on the CPU",
    "make docs": "continuous integration builds the site before the tests",
    "pytest tests/properties tests/sim": "continuous integration runs these tests",
    "ray up cluster.yaml": "starts machines on AWS; `unit/test_cluster_file.py` checks the file",
    "ray dashboard cluster.yaml": "needs the machines on AWS",
    "ray job ": "needs a cluster on AWS; `ray/test_job_submit.py` submits jobs to a local one",
    "ray status": "is about the cluster on AWS",
    "elastic simulate parcae-ll.txt": "needs a recorded trace; `sim/test_simulate.py` has others",
    "export RAY_AUTH_MODE=token": "`ray/test_job_submit.py` sets these variables",
    "export RAY_USE_TLS=1": "needs certificates on every machine; Ray's own setting",
    "export RAY_TLS_": "needs certificates on every machine; Ray's own setting",
    "ray get-auth-token": "writes to the home folder; `ray/test_job_submit.py` has its own token",
    "ray drain-node": "needs a node's id; `ray/test_ray_notices.py` drains nodes",
    "pip install ": "downloads packages",
    "docker ": "needs Docker; `unit/test_deploy.py` checks the Dockerfile",
    "helm ": "needs Kubernetes; `unit/test_deploy.py` checks the files",
    "kubectl ": "needs Kubernetes; `unit/test_deploy.py` checks the files",
    "sysctl ": "changes the machine",
    "transformers serve": "serves until it is stopped; needs `transformers[serving]`",
    "vllm serve": "needs a GPU",
    "curl ": "needs one of these two servers",
    "accelerate launch": "Accelerate is no dependency; `processes/test_conversions.py` compares",
    "torchrun ": "`processes/test_migration_examples.py` starts the script with it",
    "pkill ": "kills every controller on the machine; `ray/test_controller_death.py` kills one",
    "tail -f": "follows a file until it is stopped",
    ".venv/bin/mlflow ui": "serves until it is stopped",
    "python -m pdb": "waits for its user; `processes/test_in_process.py` debugs",
    "s3://": "needs an object store; `processes/test_data_by_url.py`, `test_durable.py` and "
    "`test_status_on_s3.py` run such commands on a local one",
    "tensorboard ": "serves until it is stopped",
    "pipelines.callbacks:": "needs a package that is no dependency; "
    "`unit/test_ready_made_callbacks.py` tries it where it is installed",
    "--interface eth0": "needs this interface; `ray/test_data_and_network.py` names another",
    "https://example.com": "posts to the internet; `unit/test_notify.py` posts to a local server",
}
"""How a command line begins, or an argument that it contains, and why it is not run."""


def reason(command: Command) -> str:
    """Why no test runs this command line; empty if one does."""
    for text, why in NOT_RUN.items():
        if command.text.startswith(text) or (text in command.text and text in ARGUMENTS):
            return why
    return ""


ARGUMENTS = ("s3://", "pipelines.callbacks:", "--interface eth0", "https://example.com")
"""Those of `NOT_RUN` that may be anywhere in a command line."""


def unused() -> list[str]:
    """The entries of `NOT_RUN` for which there is no command line any more."""
    whys = {reason(command) for command in COMMANDS}
    return [text for text, why in NOT_RUN.items() if why not in whys]
