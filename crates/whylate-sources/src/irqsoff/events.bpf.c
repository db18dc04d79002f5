// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * Each section with interrupts or preemption off: from preemptirq:irq_disable to irq_enable, or preempt_disable to preempt_enable. The
 * kernel reports only outermost ones. An event costs 40 to 60 ns, as it reads the clock once.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>
#include "distribution.bpf.h"
#include "pid_namespace.bpf.h"
#include "registers.bpf.h"
#include "ways.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

enum section_limits {
	MAX_PLACES = 4096,
	/* Maximum frames of a stack, including those of the tracepoint and this program. */
	SECTION_FRAMES = 64,
	PLACE_NAME_LENGTH = 96,
	/* Frames searched for the caller: the frames of the tracepoint come first. */
	CALLER_FRAMES = 12,
};

enum section_lost {
	/* It ended without a seen start, or started twice. */
	SECTION_UNMATCHED,
	/* No room for another call site. */
	SECTION_PLACES_FULL,
	/* No room for a value in a histogram. */
	SECTION_BUCKETS_FULL,
	/* No room for a late event: the reader is too slow. */
	SECTION_LATE_EVENTS,
	SECTION_LOST_REASONS,
};

/* The section of a CPU, in a cache line of its own. */
struct section {
	/* 0: no section. */
	u64 since_ns;
	u64 disabled_by;
	/* Set by user space: minimum length of late events. */
	u64 send_from_ns;
	/* Set by user space: the CPU is measured. */
	u32 is_watched;
	/* The idle thread runs, with preemption off. */
	u32 is_idle;
	u64 lost[SECTION_LOST_REASONS];
};

/* Code addresses. */
struct place_key {
	u64 enabled_by;
	/* 0 for short sections, if the kernel does not report it. */
	u64 caller;
	u64 disabled_by;
};

/* A call site that ends sections: their lengths and the names of its functions. */
struct place {
	/* ELEMENT_COUNTS, or as in elements.bpf.h. */
	u64 state;
	struct place_key key;
	struct distribution length;
	char enabled_by[PLACE_NAME_LENGTH];
	char caller[PLACE_NAME_LENGTH];
	char disabled_by[PLACE_NAME_LENGTH];
};

struct late_section {
	u64 start_ns;
	u64 end_ns;
	struct place_key key;
	u32 cpu;
	u32 tid;
	/* Element of place_by_id; 0 if there was no room. */
	u32 place;
	s32 stack_bytes;
	char comm[16];
	u64 stack[SECTION_FRAMES];
};

/* Never holds data: puts the types that user space shares into the skeleton. */
struct {
	struct late_section late_section;
	struct place place;
	struct place_key place_key;
	enum section_limits section_limits;
	enum section_lost section_lost;
} layouts = {};

/* Minimum length for which the caller of the ending function is looked up: walking the stack takes a microsecond. */
const volatile u64 caller_from_ns = 10000;

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	/* User space makes it as long as there are CPUs. */
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct section);
} section_by_cpu SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_PLACES);
	__type(key, struct place_key);
	__type(value, u32);
} place_by_key SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_PLACES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct place);
} place_by_id SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} late_sections SEC(".maps");

static __always_inline struct section *section_of_cpu(u32 cpu)
{
	return bpf_map_lookup_elem(&section_by_cpu, &cpu);
}

/* Interrupts or preemption are off, so no other program counts on this CPU. */
static __always_inline void lose(struct section *section, enum section_lost reason)
{
	section->lost[reason]++;
}

static __always_inline void write_name(char *name, u64 address)
{
	if (address)
		BPF_SNPRINTF(name, PLACE_NAME_LENGTH, "%ps", (void *)address);
}

static __always_inline bool has_key(const struct place *place, const struct place_key *key)
{
	return place->key.enabled_by == key->enabled_by && place->key.caller == key->caller && place->key.disabled_by == key->disabled_by;
}

/* Returns 0 if there is no room. The order of the steps is that of elements.bpf.h. */
static __noinline u32 new_place(const struct place_key *key)
{
	u32 id, *known;
	struct place *place;

	if (!key)
		return 0;
	id = take_element(&place_by_id, MAX_PLACES);
	place = bpf_map_lookup_elem(&place_by_id, &id);
	if (!id || !place)
		return 0;
	place->key = *key;
	place->enabled_by[0] = place->caller[0] = place->disabled_by[0] = 0;
	write_name(place->enabled_by, key->enabled_by);
	write_name(place->caller, key->caller);
	write_name(place->disabled_by, key->disabled_by);
	if (!bpf_map_update_elem(&place_by_key, key, &id, BPF_NOEXIST)) {
		store_in_order(&place->state, ELEMENT_COUNTS);
		return id;
	}
	/* Another CPU was faster. */
	__builtin_memset(&place->key, 0, sizeof(place->key));
	return_element(&place_by_id, id);
	known = bpf_map_lookup_elem(&place_by_key, key);
	id = known ? *known : 0;
	place = bpf_map_lookup_elem(&place_by_id, &id);
	return id && place && has_key(place, key) ? id : 0;
}

/* Returns the caller of the function at `address`; 0 if it is not in the stack. */
static __noinline u64 caller_of(void *context, u64 address)
{
	u64 stack[CALLER_FRAMES] = {};
	long bytes = bpf_get_stack(context, stack, sizeof(stack), 0);

	if (bytes < 0)
		return 0;
	for (u32 frame = 0; frame + 1 < CALLER_FRAMES; frame++) {
		if (stack[frame] == address)
			return stack[frame + 1];
	}
	return 0;
}

static __noinline void send_late(void *context, struct section *section, const struct place_key *key, u32 place, u64 now_ns)
{
	struct late_section *late = bpf_ringbuf_reserve(&late_sections, sizeof(*late), 0);

	if (!late) {
		lose(section, SECTION_LATE_EVENTS);
		return;
	}
	late->start_ns = section->since_ns;
	late->end_ns = now_ns;
	late->key = *key;
	late->cpu = bpf_get_smp_processor_id();
	late->tid = shown_number(bpf_get_current_task_btf());
	late->place = place;
	bpf_get_current_comm(late->comm, sizeof(late->comm));
	late->stack_bytes = bpf_get_stack(context, late->stack, sizeof(late->stack), 0);
	bpf_ringbuf_submit(late, 0);
}

static __always_inline int begins(u64 address)
{
	struct section *section = section_of_cpu(bpf_get_smp_processor_id());

	if (!section || !section->is_watched)
		return 0;
	if (section->since_ns)
		lose(section, SECTION_UNMATCHED);
	section->disabled_by = address;
	section->since_ns = bpf_ktime_get_ns();
	return 0;
}

static __always_inline int ends(void *context, u64 address, u64 parent)
{
	struct section *section = section_of_cpu(bpf_get_smp_processor_id());
	u64 now_ns = bpf_ktime_get_ns();
	struct place_key key = {};
	u32 id, *known;
	struct place *place;
	u64 length_ns;

	if (!section || !section->is_watched)
		return 0;
	if (!section->since_ns) {
		if (!section->is_idle)
			lose(section, SECTION_UNMATCHED);
		return 0;
	}
	length_ns = since(now_ns, section->since_ns);
	key.enabled_by = address;
	key.caller = parent;
	key.disabled_by = section->disabled_by;
	if (!parent && length_ns >= caller_from_ns)
		key.caller = caller_of(context, address);
	known = bpf_map_lookup_elem(&place_by_key, &key);
	id = known ? *known : 0;
	place = bpf_map_lookup_elem(&place_by_id, &id);
	if (!id || !place || !has_key(place, &key)) {
		id = new_place(&key);
		place = bpf_map_lookup_elem(&place_by_id, &id);
	}
	if (!id || !place)
		lose(section, SECTION_PLACES_FULL);
	else if (!distribution_add(&place->length, length_ns, true))
		lose(section, SECTION_BUCKETS_FULL);
	if (length_ns >= section->send_from_ns)
		send_late(context, section, &key, id, now_ns);
	section->since_ns = 0;
	return 0;
}

SEC("?tp_btf/irq_disable")
int BPF_PROG(on_irq_disable, unsigned long address, unsigned long parent)
{
	return begins(address);
}

SEC("?tp_btf/irq_enable")
int BPF_PROG(on_irq_enable, unsigned long address, unsigned long parent)
{
	return ends(ctx, address, parent);
}

SEC("?tp_btf/preempt_disable")
int BPF_PROG(on_preempt_disable, unsigned long address, unsigned long parent)
{
	return begins(address);
}

SEC("?tp_btf/preempt_enable")
int BPF_PROG(on_preempt_enable, unsigned long address, unsigned long parent)
{
	return ends(ctx, address, parent);
}

/*
 * Preemption is off from schedule() in one thread until schedule() returns in another one. The CPU may be idle in between; the section
 * counts for the next thread from the switch on.
 */
SEC("?tp_btf/sched_switch")
int BPF_PROG(on_sched_switch, bool preempt, struct task_struct *previous, struct task_struct *next)
{
	struct section *section = section_of_cpu(bpf_get_smp_processor_id());

	if (!section || !section->is_watched)
		return 0;
	section->is_idle = next->pid == 0;
	section->since_ns = section->is_idle ? 0 : bpf_ktime_get_ns();
	return 0;
}

/*
 * A CPU goes offline with interrupts off, and comes back with them on, maybe hours later. Another CPU takes the steps
 * just before it comes back: what is off there then is no section.
 */
SEC("?tp_btf/cpuhp_enter")
int BPF_PROG(on_cpuhp_enter, unsigned int cpu)
{
	struct section *section;

	if (cpu == bpf_get_smp_processor_id())
		return 0;
	section = section_of_cpu(cpu);
	if (section)
		section->since_ns = 0;
	return 0;
}
