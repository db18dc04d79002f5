// SPDX-License-Identifier: MIT OR Apache-2.0
// A process with hostile names: its own, which changes a thousand times a second, and those of code generated at run time
// and listed in a perf map. Its argument is the perf map to write; it exits when its standard input closes.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static const char *const names[] = {
	"\x1b[2J\x1b[H", "a\nb\nc", "a;b c\"d\\", "\xff\xfe\xc0", "\x9b" "31m\x07", "\xc2\x9b" "2J", "\xe2\x80\xae" "evil",
};
#define NAMES (sizeof(names) / sizeof(names[0]))

static void *rename_it(void *unused)
{
	const struct timespec nearly_ms = { 0, 800000 };
	for (unsigned round = 0;; round++) {
		prctl(PR_SET_NAME, names[round % NAMES]);
		nanosleep(&nearly_ms, NULL);
	}
	return unused;
}

#ifdef __x86_64__
#define SLOT 64
// mov $35 (nanosleep), %eax; xor %esi, %esi; syscall; ret
static const uint8_t nap[] = { 0xb8, 35, 0, 0, 0, 0x31, 0xf6, 0x0f, 0x05, 0xc3 };

static void *sleep_in(void *code)
{
	const struct timespec ms = { 0, 2000000 };
	prctl(PR_SET_NAME, "x\x1b]0;title\x07");
	for (;;)
		((void (*)(const struct timespec *))code)(&ms);
	return NULL;
}

static int make_code(const char *map)
{
	uint8_t *code = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	FILE *told = fopen(map, "w");
	if (code == MAP_FAILED || !told)
		return 1;
	for (unsigned slot = 0; slot < NAMES; slot++) {
		pthread_t thread;
		memcpy(code + slot * SLOT, nap, sizeof(nap));
		// A line feed ends the line.
		fprintf(told, "%lx %x jit %s\n", (unsigned long)code + slot * SLOT, SLOT, names[slot]);
		if (pthread_create(&thread, NULL, sleep_in, code + slot * SLOT))
			return 1;
	}
	return fclose(told);
}
#else
static int make_code(const char *map)
{
	return map == NULL;
}
#endif

int main(int count, char **words)
{
	pthread_t thread;
	char end;
	if (count != 2 || make_code(words[1]) || pthread_create(&thread, NULL, rename_it, NULL))
		return 1;
	puts("ready");
	fflush(stdout);
	while (read(0, &end, 1) > 0)
		;
	return 0;
}
