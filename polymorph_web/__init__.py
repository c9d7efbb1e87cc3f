"""The Django project: who may do what, what was decided, what people see. Holds no torch."""
