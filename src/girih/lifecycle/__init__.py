"""Plans, opens, resumes, rescales and closes one run."""
