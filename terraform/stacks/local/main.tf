locals {
  # Where the container side of the ingress listens.
  ingress_container_port = 80

  repository     = abspath("${path.module}/../../..")
  wheelhouse_dir = coalesce(var.wheelhouse_dir, "${local.repository}/.local/wheelhouse")
  models_dir     = coalesce(var.models_dir, "${local.repository}/.local/models")

  # A fixed first place per role, so that changing one count moves nobody's address. Routers have cores of their own in a real
  # site; here they share them with engines that compute without a pause, and weigh more.
  roles = {
    prefill = { count = var.prefill_count, first = 10, memory = var.memory.prefill, cpu_shares = 1024 }
    decode  = { count = var.decode_count, first = 70, memory = var.memory.decode, cpu_shares = 1024 }
    router  = { count = var.router_count, first = 130, memory = var.memory.router, cpu_shares = 8192 }
  }

  ingress_host = "${var.name}-router-1"

  hosts = merge([
    for role, pool in local.roles : {
      for i in range(pool.count) : "${var.name}-${role}-${i + 1}" => {
        role       = role
        address    = cidrhost(var.subnet, pool.first + i)
        memory     = pool.memory
        cpu_shares = pool.cpu_shares
      }
    }
  ]...)

  nodes = {
    for name, host in local.hosts : name => {
      role           = host.role
      address        = host.address
      fabric_address = host.address
      rdma_devices   = []
      gpus           = 0
      shape          = "container"
      also           = name == local.ingress_host ? ["ingress"] : []
      # Ansible enters a container by its name, through podman.
      vars = { ansible_connection = "containers.podman.podman", ansible_host = name }
    }
  }
}

# A destroy-time provisioner sees only `self`: all it needs is in `input`.
resource "terraform_data" "network" {
  input            = { script = "${path.module}/scripts/network.sh", name = var.name, subnet = var.subnet }
  triggers_replace = [var.name, var.subnet]

  provisioner "local-exec" {
    interpreter = ["/bin/bash"]
    command     = self.input.script
    environment = { ACTION = "create", NETWORK = self.input.name, SUBNET = self.input.subnet }
  }

  provisioner "local-exec" {
    when        = destroy
    interpreter = ["/bin/bash"]
    command     = self.output.script
    environment = { ACTION = "destroy", NETWORK = self.output.name }
  }
}

resource "terraform_data" "host" {
  for_each = local.hosts

  input = {
    script     = "${path.module}/scripts/host.sh"
    name       = each.key
    network    = terraform_data.network.output.name
    address    = each.value.address
    image      = var.image
    wheelhouse = local.wheelhouse_dir
    models     = local.models_dir
    shm_size   = var.shm_size
    memory     = each.value.memory
    cpu_shares = each.value.cpu_shares
    publish    = each.key == local.ingress_host ? "${var.ingress_host}:${var.ingress_port}:${local.ingress_container_port}" : ""
  }
  triggers_replace = [
    terraform_data.network.id, each.value.address, each.value.memory, each.value.cpu_shares, var.image, local.wheelhouse_dir,
    local.models_dir, var.shm_size, each.key == local.ingress_host ? [var.ingress_host, var.ingress_port] : [],
  ]

  provisioner "local-exec" {
    interpreter = ["/bin/bash"]
    command     = self.input.script
    environment = {
      ACTION     = "create"
      HOST       = self.input.name
      NETWORK    = self.input.network
      ADDRESS    = self.input.address
      IMAGE      = self.input.image
      WHEELHOUSE = self.input.wheelhouse
      MODELS     = self.input.models
      SHM_SIZE   = self.input.shm_size
      MEMORY     = self.input.memory
      CPU_SHARES = self.input.cpu_shares
      PUBLISH    = self.input.publish
    }
  }

  provisioner "local-exec" {
    when        = destroy
    interpreter = ["/bin/bash"]
    command     = self.output.script
    environment = { ACTION = "destroy", HOST = self.output.name }
  }
}

module "inventory" {
  source = "../../modules/inventory"
  nodes  = local.nodes
}
