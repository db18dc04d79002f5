/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Interrupts not raised by devices, by the names of their x86 tracepoints less `_entry` and `_exit`. Kernels lack some. */
#pragma once

#define EACH_VECTOR(VECTOR)                                                                                                                \
	VECTOR(local_timer, VECTOR_LOCAL_TIMER)                                                                                            \
	VECTOR(reschedule, VECTOR_RESCHEDULE)                                                                                              \
	VECTOR(call_function, VECTOR_CALL_FUNCTION)                                                                                        \
	VECTOR(call_function_single, VECTOR_CALL_FUNCTION_SINGLE)                                                                          \
	VECTOR(irq_work, VECTOR_IRQ_WORK)                                                                                                  \
	VECTOR(x86_platform_ipi, VECTOR_PLATFORM_IPI)                                                                                      \
	VECTOR(thermal_apic, VECTOR_THERMAL)                                                                                               \
	VECTOR(threshold_apic, VECTOR_THRESHOLD)                                                                                           \
	VECTOR(deferred_error_apic, VECTOR_DEFERRED_ERROR)                                                                                 \
	VECTOR(error_apic, VECTOR_ERROR)                                                                                                   \
	VECTOR(spurious_apic, VECTOR_SPURIOUS)
