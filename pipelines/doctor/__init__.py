"""`elastic doctor`: what a run would stumble over here, and how to mend it."""

from pipelines.doctor.doctor import DoctorRequest, check_run, doctor

__all__ = ["DoctorRequest", "check_run", "doctor"]
