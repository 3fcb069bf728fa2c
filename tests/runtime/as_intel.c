/* A library of execution providers that loads OpenVINO's plugin, and lets it take any processor for one of Intel.

   OpenVINO runs on other x86-64 processors, but its plugin (1.8.1) only lists hardware whose vendor is Intel. It asks
   ONNX Runtime for the vendor, by the entry HardwareDevice_VendorId of OrtApi. Entries are never removed or moved, and
   fewer than are copied here: nothing uses those beyond.
   The environment variable OPENVINO_PLUGIN is the path of the plugin. */
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { VENDOR_ID = 308, ENTRIES = 512, INTEL = 0x8086 };

typedef struct {
  const void* (*get_api)(uint32_t version);
  const char* (*get_version)(void);
} ApiBase;

static const ApiBase* real_base;
static ApiBase base;
static const void* entries[ENTRIES];
static void* plugin;

static uint32_t vendor_id(const void* device) {
  (void)device;
  return INTEL;
}

static const void* get_api(uint32_t version) {
  const void* api = real_base->get_api(version);
  if (!api) return NULL;
  memcpy(entries, api, sizeof entries);
  entries[VENDOR_ID] = (const void*)vendor_id;
  return entries;
}

void* CreateEpFactories(const char* name, const ApiBase* given, const void* logger, void** factories, size_t most,
                        size_t* number) {
  void* (*create)(const char*, const ApiBase*, const void*, void**, size_t, size_t*);
  real_base = given;
  base = *given;
  base.get_api = get_api;
  plugin = dlopen(getenv("OPENVINO_PLUGIN"), RTLD_NOW);
  *(void**)&create = dlsym(plugin, "CreateEpFactories");
  return create(name, &base, logger, factories, most, number);
}

void* ReleaseEpFactory(void* factory) {
  void* (*release)(void*);
  *(void**)&release = dlsym(plugin, "ReleaseEpFactory");
  return release(factory);
}
