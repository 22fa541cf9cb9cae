"""`elastic doctor`: what a run would stumble over here, and how to mend it."""

from pipelines.doctor.doctor import DoctorAsked, check_run, doctor

__all__ = ["DoctorAsked", "check_run", "doctor"]
