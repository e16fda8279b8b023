import enum


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    FINAL_ONLY = 2
