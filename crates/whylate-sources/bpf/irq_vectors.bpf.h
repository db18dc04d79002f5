/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Interrupts not raised by devices (x86). One program is attached to the entry tracepoints of all vectors and one to their exit
 * tracepoints: a pair for each vector took a third of the time of loading. The first argument of each tracepoint is the vector's number.
 */
#pragma once

#include "occupancy.bpf.h"

/* arch/x86/include/asm/irq_vectors.h; any other number is of a spurious interrupt. */
static __always_inline enum irq_vector vector_of(int number)
{
	switch (number) {
	case 0xec:
		return VECTOR_LOCAL_TIMER;
	case 0xfd:
		return VECTOR_RESCHEDULE;
	case 0xfc:
		return VECTOR_CALL_FUNCTION;
	case 0xfb:
		return VECTOR_CALL_FUNCTION_SINGLE;
	case 0xf6:
		return VECTOR_IRQ_WORK;
	case 0xf7:
		return VECTOR_PLATFORM_IPI;
	case 0xfa:
		return VECTOR_THERMAL;
	case 0xf9:
		return VECTOR_THRESHOLD;
	case 0xf4:
		return VECTOR_DEFERRED_ERROR;
	case 0xfe:
		return VECTOR_ERROR;
	default:
		return VECTOR_SPURIOUS;
	}
}
