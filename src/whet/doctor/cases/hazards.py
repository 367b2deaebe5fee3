"""Which of the silent bugs that others met does this device have? Each was described at pytorch/pytorch."""

from whet.doctor.case import Case
from whet.doctor.cases.wrong_memory import MEMORY
from whet.doctor.cases.wrong_products import PRODUCTS
from whet.doctor.cases.wrong_training import TRAINING

CASES: list[Case] = [*PRODUCTS, *MEMORY, *TRAINING]
