# Existing hosts: nothing is made, the plan is the check.
module "catalog" {
  source = "../../modules/catalog"
}

module "fleet" {
  source = "../../modules/fleet"

  name          = var.name
  provider_name = "onprem"
  zone          = var.zone
  members       = { for name, host in var.hosts : name => { role = host.role, shape = host.shape, also = host.also } }
  transport     = var.transport
  prices        = var.prices
}

locals {
  nodes = {
    for name, host in var.hosts : name => {
      role           = host.role
      also           = host.also
      address        = host.address
      fabric_address = host.fabric_address
      rdma_devices   = host.rdma_devices
      gpus           = module.fleet.shapes[host.shape].gpus
      shape          = host.shape
      vars           = merge({ ansible_user = var.ssh_user, tilert_transport = var.transport.library, tilert_protocol = var.transport.protocol }, host.ansible_host == null ? {} : { ansible_host = host.ansible_host })
    }
  }
}

module "inventory" {
  source = "../../modules/inventory"
  nodes  = local.nodes
}
