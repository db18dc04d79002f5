/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What an interrupt has interrupted. */
#pragma once

#include "registers.bpf.h"

/*
 * Distance of `__irq_regs` from `hrtimer_bases`, which each timer refers to; 0 if the kernel has no such variable. It
 * points to the registers that the current interrupt has saved (lib/irq_regs.c).
 */
const volatile s64 irq_registers_distance = 0;

static __always_inline u64 timer_bases_here(const struct hrtimer *timer)
{
	return (u64)BPF_CORE_READ(timer, base, cpu_base);
}

/* Whether the current interrupt has interrupted user code; false if unknown. */
static __always_inline bool user_is_interrupted(u64 timer_bases)
{
	const struct pt_regs *registers = NULL;

	if (!irq_registers_distance || !timer_bases)
		return false;
	if (bpf_probe_read_kernel(&registers, sizeof(registers), (const void *)(timer_bases + irq_registers_distance)) || !registers)
		return false;
	return are_of_user(registers);
}
