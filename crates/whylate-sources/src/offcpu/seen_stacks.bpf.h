/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Caches of stacks that were captured on this CPU, with the words that identify them: threads block in the same places
 * again and again, and unwinding a stack takes longer than everything else of a switch.
 *
 * Unwinding is a function of memory: from the caller of the program it follows return addresses, and values that lead
 * from a frame to the next. All are words of the stack; return addresses are in the kernel's code, and the rest (saved
 * frame pointers, stack pointers of interrupted code) points into the same stack. All words of either kind are cached
 * with their positions, also those outside the chain. If a stack has the same depth and the same values there (values
 * that point into the stack are relative to its start), the unwinder reads, step by step, the same words and finds the
 * same frames. Any difference only costs that the stack is unwound again.
 *
 * If the kernel randomizes stack offsets (CONFIG_RANDOMIZE_KSTACK_OFFSET), do_syscall_64() leaves a random gap below its
 * frame. Only the entry code calls it, at the very end of the stack: all words up to the call are cached, and the return
 * address that follows, at the end. Values that point beyond the call are relative to the end, as they do not shift.
 *
 * For a user stack, the unwind rules say which words are read: the registers and words used are cached.
 *
 * A CPU's tables are used only by switches, which do not nest; walks, one at a time, have a table of their own. So no
 * entry is written while it is compared.
 */
#pragma once

enum {
	/* A deeper kernel stack is unwound each time. */
	KERNEL_WORDS = 256,
	/* Maximum number of cached words, of a kernel stack and of a user stack. */
	KEPT_WORDS = 64,
	KEPT_USER_WORDS = 32,
	/* Bytes copied at a time from a user stack. */
	USER_COPY_BYTES = 256,
	/* Flags of a word's position: it points into the stack. */
	POINTS_THERE = 1 << 15,
	POINTS_TO_END = 1 << 14,
	/* It is the last word, at any depth. */
	IS_LAST = 1 << 13,
	SEEN_KERNEL_STACKS = 256,
	SEEN_USER_STACKS = 512,
	SEEN_PLACES = 512,
};

enum {
	/* Code segment of 64-bit programs on x86 (arch/x86/include/asm/segment.h, __USER_CS). */
	X86_USER_CS = 0x33,
};

/* The kernel's code, modules and BPF programs on x86 are in the upper 2 GiB (Documentation/arch/x86/x86_64/mm.rst). */
#define KERNEL_CODE 0xffffffff80000000ull

struct seen_kernel_stack {
	/* One more than the generation of the tables that have the stack; 0: free. */
	u32 generation;
	u32 id;
	/* Depth; of a stack with a random gap, the minimum: up to the system call, as the rest may be of an earlier stack. */
	u32 bytes;
	u32 count;
	u8 moves;
	u16 at[KEPT_WORDS];
	u64 words[KEPT_WORDS];
};

/* All addresses are relative to the stack pointer. */
struct seen_user_stack {
	u32 generation;
	u32 id;
	u64 ip;
	u64 bp;
	u32 process;
	u32 count;
	/* The register was used before another value was read; it was 0, which ends a chain and is no address. */
	u8 is_bp_used;
	u8 is_bp_zero;
	u32 at[KEPT_USER_WORDS];
	u64 words[KEPT_USER_WORDS];
};

struct seen_place {
	u32 generation;
	u32 place;
	struct place_key key;
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SEEN_KERNEL_STACKS);
	__type(key, u32);
	__type(value, struct seen_kernel_stack);
} kernel_stack_by_seen SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SEEN_USER_STACKS);
	__type(key, u32);
	__type(value, struct seen_user_stack);
} user_stack_by_seen SEC(".maps");

/* Used by walks, which may sleep in between. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SEEN_USER_STACKS);
	__type(key, u32);
	__type(value, struct seen_user_stack);
} user_stack_by_seen_in_walks SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, SEEN_PLACES);
	__type(key, u32);
	__type(value, struct seen_place);
} place_by_seen SEC(".maps");

struct stack_copy {
	/* Addresses; volatile: the verifier does not track values read from memory. */
	volatile u64 begin;
	volatile u64 end;
	/* While caching: words to visit (up to the call if there is a gap), words cached, frames found, innermost first. */
	volatile u32 words_to_visit;
	volatile u32 kept;
	volatile u32 found;
	/* The return address into do_syscall_64(), and its position. */
	volatile u32 called_at;
	volatile u64 caller;
	u64 words[KERNEL_WORDS];
	/* A chunk of the user stack, and its address. */
	volatile u64 user_begin;
	u64 user_words[USER_COPY_BYTES / 8];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct stack_copy);
} stack_copy_of_cpu SEC(".maps");

enum taken_at {
	AT_SWITCH,
	AT_WAKING,
	TAKEN_AT,
};

/* Position of the scheduler's caller in a copy, once known: a hint that selects the slot. */
u32 caller_at[TAKEN_AT] = {};

static __always_inline u32 seen_slot(u64 first, u64 second)
{
	return ((first + (second << 20)) * 0x9e3779b97f4a7c15ull) >> 40;
}

/*
 * Copies the running thread's stack from the tracepoint's arguments, in the frame of the program's caller, to the saved
 * user registers, where unwinding ends. The part below, between this program and its caller, is always the same.
 * Returns the bytes copied; 0 if there are too many.
 */
static __always_inline u32 copy_kernel_stack(const struct pt_regs *regs, const void *arguments, struct stack_copy *copy)
{
	u64 begin, bytes;

	copy->begin = (u64)arguments;
	copy->end = (u64)regs;
	begin = copy->begin;
	bytes = copy->end - begin;
	if (bytes > sizeof(copy->words) || bytes < 8 || bpf_probe_read_kernel(copy->words, bytes, (void *)begin))
		return 0;
	return bytes;
}

/* Whether the kernel stack is the cached one. Global, so that it is verified by itself, once. */
__noinline int is_same_kernel_stack(const struct seen_kernel_stack *seen, const struct stack_copy *copy)
{
	u64 differs = 0, begin, end, last;

	if (!seen || !copy)
		return 0;
	begin = copy->begin;
	end = copy->end;
	last = (end - begin) / 8 - 1;
	for (u32 i = 0; i < KEPT_WORDS && i < seen->count; i++) {
		u64 at = seen->at[i];
		/* All bits, or none. */
		u64 points_there = -(at >> 15 & 1), points_to_end = -(at >> 14 & 1), is_last = -(at >> 13 & 1);
		u64 word = copy->words[((at & ~is_last) | (last & is_last)) & (KERNEL_WORDS - 1)];

		differs |= (word - (begin & points_there) - (end & points_to_end)) ^ seen->words[i];
	}
	return !differs;
}

struct keeping {
	struct seen_kernel_stack *seen;
	struct stack_copy *copy;
	const struct stack_value *stack;
	enum taken_at at;
};

static long keep_word(u64 index, struct keeping *keeping)
{
	struct stack_copy *copy = keeping->copy;
	u32 kept = copy->kept, found = copy->found, words_to_visit = copy->words_to_visit;
	u64 word, value, at = index;

	if (index >= KERNEL_WORDS || index >= words_to_visit)
		return 1;
	word = copy->words[index];
	value = word;
	if (word < KERNEL_CODE) {
		if (word - copy->begin > copy->end - copy->begin)
			return 0;
		if (keeping->seen->moves && word - copy->begin >= words_to_visit * 8ull) {
			value = word - copy->end;
			at |= POINTS_TO_END;
		} else {
			value = word - copy->begin;
			at |= POINTS_THERE;
		}
	}
	for (u32 range = 0; range < REPLACED_RETURNS; range++) {
		if (word >= replaced_return_begin[range] && word < replaced_return_end[range])
			kept = KEPT_WORDS;
	}
	if (kept >= KEPT_WORDS) {
		copy->found = 0;
		return 1;
	}
	if (found < MAX_FRAMES && keeping->stack->frames[found] == word) {
		if (found == 2 && keeping->at < TAKEN_AT && !caller_at[keeping->at])
			caller_at[keeping->at] = index;
		copy->found = found + 1;
	}
	keeping->seen->at[kept] = at;
	keeping->seen->words[kept] = value;
	copy->kept = kept + 1;
	return 0;
}

/* Finds the return address into do_syscall_64(), and counts the words that may be it. */
static long find_system_call(u64 index, struct keeping *keeping)
{
	struct stack_copy *copy = keeping->copy;

	if (index >= KERNEL_WORDS || index >= copy->words_to_visit)
		return 1;
	if (copy->words[index] == copy->caller) {
		copy->called_at = index;
		copy->found++;
	}
	return 0;
}

/* Caches a kernel stack; not if a tracer has replaced a return address, as frames are missing then. */
__noinline int keep_kernel_stack(struct seen_kernel_stack *seen, struct stack_copy *copy, const struct stack_value *stack, u32 bytes,
				enum taken_at taken_at)
{
	struct keeping keeping = { .seen = seen, .copy = copy, .stack = stack, .at = taken_at };
	u64 outermost = 0, frame;
	bool moves = false;
	u32 length, last;

	if (!seen || !copy || !stack)
		return 0;
	length = stack->length;
	last = bytes / 8 - 1;
	copy->words_to_visit = last + 1;
	copy->kept = 0;
	copy->found = 0;
	frame = (u64)length - 2;
	/* The verifier of 6.1 derives no bounds from 32-bit arithmetic. */
	barrier_var(frame);
	if (frame < MAX_FRAMES - 1 && last < KERNEL_WORDS) {
		copy->caller = stack->frames[frame];
		outermost = stack->frames[frame + 1];
		moves = copy->caller >= system_call_begin && copy->caller < system_call_end;
	}
	if (moves) {
		bpf_loop(KERNEL_WORDS, find_system_call, &keeping, 0);
		/* If an earlier call left the same address on the stack, either may be the call. The next time it may be clear. */
		if (copy->found != 1 || copy->words[last & (KERNEL_WORDS - 1)] != outermost)
			return 0;
		copy->words_to_visit = copy->called_at + 1;
		bytes = copy->words_to_visit * 8;
		copy->found = 0;
		seen->at[0] = IS_LAST;
		seen->words[0] = outermost;
		copy->kept = 1;
		length--;
	}
	seen->generation = 0;
	seen->bytes = bytes;
	seen->moves = moves;
	bpf_loop(KERNEL_WORDS, keep_word, &keeping, 0);
	seen->count = copy->kept;
	seen->id = stack->id;
	seen->generation = copy->found >= length ? generation + 1 : 0;
	return 0;
}

enum {
	/* Flag of the (aligned) position of a user word: a frame pointer, so relative to the stack pointer. */
	IS_FRAME_POINTER = 1,
};

static __always_inline void keep_no_words(struct seen_user_stack *seen)
{
	seen->count = KEPT_USER_WORDS + 1;
}

/* Caches a word that unwinding used, `at` bytes above the stack pointer; with one too many the stack is not cached. */
__noinline int keep_user_word(struct seen_user_stack *seen, u64 at, u64 word)
{
	u32 count;

	if (!seen)
		return 0;
	count = seen->count;
	if (count >= KEPT_USER_WORDS || at >> 31) {
		keep_no_words(seen);
		return 0;
	}
	seen->at[count] = at;
	seen->words[count] = word;
	seen->count = count + 1;
	return 0;
}

/* Unwinding continues with the frame pointer, which was read at `at`; 0: it is still the register. */
__noinline int keep_frame_pointer(struct seen_user_stack *seen, u64 sp, u64 at, u64 bp)
{
	if (!seen)
		return 0;
	if (!at)
		seen->is_bp_used = true;
	else if (!bp)
		keep_user_word(seen, at - sp, 0);
	else
		keep_user_word(seen, (at - sp) | IS_FRAME_POINTER, bp - sp);
	return 0;
}

/* Whether the cached words of the user stack are unchanged. Copied chunks are aligned: each lies in one page. */
__noinline int has_same_user_words(const struct seen_user_stack *seen, struct stack_copy *copy, u64 sp)
{
	if (!seen || !copy)
		return 0;
	copy->user_begin = 0;
	for (u32 i = 0; i < KEPT_USER_WORDS && i < seen->count; i++) {
		u32 kept_at = seen->at[i];
		u64 at = sp + (kept_at & ~7u);
		u64 begin = at & ~(USER_COPY_BYTES - 1ull);
		/* All bits, or none. */
		u64 is_frame_pointer = -(u64)(kept_at & IS_FRAME_POINTER);
		u64 word;

		if (begin != copy->user_begin && bpf_probe_read_user(copy->user_words, USER_COPY_BYTES, (void *)begin))
			return 0;
		copy->user_begin = begin;
		word = copy->user_words[(at >> 3) & (USER_COPY_BYTES / 8 - 1)];
		if (word - (sp & is_frame_pointer) != seen->words[i])
			return 0;
	}
	return 1;
}

/*
 * Compares the cached words of a sleeping thread with the window copied from its stack pointer on; no stack with words
 * above the window is cached. 0: all are equal; otherwise a hash of the differing stack's words, which selects its slot.
 */
__noinline u64 other_words_in_window(const struct seen_user_stack *seen, const struct scratch *scratch, u64 sp, u32 bytes)
{
	u64 differs = 0, hash = 0;

	if (!seen || !scratch)
		return 1;
	for (u32 i = 0; i < KEPT_USER_WORDS && i < seen->count; i++) {
		u64 kept_at = seen->at[i], at = kept_at & ~7ull, word;
		/* All bits, or none. */
		u64 is_frame_pointer = -(kept_at & IS_FRAME_POINTER);

		if (at + 8 > bytes)
			return 1;
		word = scratch->window[(at >> 3) & (WINDOW_BYTES / 8 - 1)] - (sp & is_frame_pointer);
		differs |= word ^ seen->words[i];
		hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
		hash ^= hash >> 32;
	}
	return differs ? hash | 1 : 0;
}

/* Slot of a user stack. Stacks of threads that do the same often start at the same offset in a page. */
static __always_inline u32 slot_of_user_stack(const struct pt_regs *regs, u32 process)
{
	return seen_slot(regs->ip ^ (u64)process << 48, regs->sp & (PAGE_BYTES - 1)) & (SEEN_USER_STACKS - 1);
}

/* Whether a 64-bit program has the registers of the cached stack; its words decide the rest. */
static __always_inline bool has_same_registers(const struct seen_user_stack *seen, u32 process, u64 ip, u64 sp, u64 bp)
{
	if (seen->generation != generation + 1 || seen->process != process || seen->ip != ip || sp & 7 || seen->is_bp_zero != !bp)
		return false;
	return !seen->is_bp_used || seen->bp == bp - sp;
}

/* Resets the entry: no words used yet. */
static __always_inline void begin_keeping(struct seen_user_stack *seen, u32 process, u64 ip, u64 sp, u64 bp)
{
	seen->generation = 0;
	seen->process = process;
	seen->ip = ip;
	seen->bp = bp - sp;
	seen->is_bp_zero = !bp;
	seen->is_bp_used = false;
	seen->count = 0;
}

/* An unwind that ended early may have ended for another reason than these words, and is not cached. */
static __always_inline void end_keeping(struct seen_user_stack *seen, u32 id, bool is_complete)
{
	if (!is_complete || seen->count > KEPT_USER_WORDS)
		return;
	seen->id = id;
	seen->generation = id ? generation + 1 : 0;
}

/* Index of a place, a new one if the place is not known; PLACES if there is no room. */
static __noinline u32 number_of_place(const struct place_key *key)
{
	u32 *known = bpf_map_lookup_elem(&place_by_key, key);
	u32 place;

	if (known)
		return *known;
	place = __sync_fetch_and_add(&places, 1);
	if (place >= most_places)
		return PLACES;
	if (!bpf_map_update_elem(&place_by_key, key, &place, BPF_NOEXIST))
		return place;
	/* Another CPU was faster, or there is no room. */
	known = bpf_map_lookup_elem(&place_by_key, key);
	return known ? *known : PLACES;
}

static __always_inline bool is_same_key(const struct place_key *one, const struct place_key *other)
{
	const u64 *words = (const void *)one, *other_words = (const void *)other;
	u64 differs = 0;

	_Static_assert(sizeof(*one) % 8 == 0, "compared by words");
	for (u32 i = 0; i < sizeof(*one) / 8; i++)
		differs |= words[i] ^ other_words[i];
	return !differs;
}

/* Variant of number_of_place() with a cache of the places that this CPU used recently. */
static __always_inline u32 number_of_seen_place(const struct place_key *key)
{
	u32 slot = seen_slot((u64)key->kernel_stack << 32 | key->user_stack, (u64)key->tid << 8 | key->state) & (SEEN_PLACES - 1);
	struct seen_place *seen = bpf_map_lookup_elem(&place_by_seen, &slot);
	u32 place;

	if (seen && seen->generation == generation + 1 && is_same_key(&seen->key, key))
		return seen->place;
	place = number_of_place(key);
	if (seen) {
		seen->generation = place == PLACES ? 0 : generation + 1;
		seen->place = place;
		seen->key = *key;
	}
	return place;
}
