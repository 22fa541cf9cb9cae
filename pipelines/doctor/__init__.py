"""`elastic doctor`: checks of the environment and of a run's files, with a fix for each problem."""

from pipelines.doctor.doctor import DoctorRequest, check_run, doctor

__all__ = ["DoctorRequest", "check_run", "doctor"]
