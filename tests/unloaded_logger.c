// A logger in a library of its own, in place of NCCL's: a host may unload it while connections live.

int lines_logged = 0;

void log_line(unsigned level, unsigned long flags, const char *file, int line, const char *format, ...) {
  (void)level, (void)flags, (void)file, (void)line, (void)format;
  lines_logged++;
}
