/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* What an interrupt found. */
#pragma once

#include "registers.bpf.h"

/*
 * How far `__irq_regs` lies from `hrtimer_bases`, to which each timer leads; 0 where the kernel has no such variable. It
 * points to the registers of what the present interrupt has interrupted (lib/irq_regs.c).
 */
const volatile s64 irq_registers_distance = 0;

static __always_inline u64 timer_bases_here(const struct hrtimer *timer)
{
	return (u64)BPF_CORE_READ(timer, base, cpu_base);
}

/* Whether the present interrupt has interrupted user code; false where that cannot be told. */
static __always_inline bool user_is_interrupted(u64 timer_bases)
{
	const struct pt_regs *registers = NULL;

	if (!irq_registers_distance || !timer_bases)
		return false;
	if (bpf_probe_read_kernel(&registers, sizeof(registers), (const void *)(timer_bases + irq_registers_distance)) || !registers)
		return false;
	return are_of_user(registers);
}
