/* The per-cycle work of drafters as one library. */
#include "growth.h"
#include "sizing.h"
#include "table.h"
